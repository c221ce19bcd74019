"""A pytest plugin: a test with many variants runs three of them at most.

For a suite that runs a second time in another setting, where variants differ by the same code: over
the fake NCCL (`nox -s tests-nccl`). The first variant is left out where there are more than three:
it is mostly the smallest, of one rank.
"""

import pytest

MOST = 3


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {id(item) for each in variants.values() for item in some(each)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def some(variants: list[pytest.Item]) -> list[pytest.Item]:
    """Every n-th one from the second, three at most; all, where there are no more than that."""
    if len(variants) <= MOST:
        return variants
    return variants[1 :: -(-len(variants) // MOST)]
