"""A pytest plugin: of tests with many costly variants, a run has some, another day the others.

``@pytest.mark.by_turns(3)``: three of the variants a day, or a few more; ``by_turns(1, of="name")``
counts the values of one parameter. ``--turn`` is a number of the day; without it, and for variants
that are named on the command line, all run. ``--most 2``: of every test, where variants differ by
the same code, as in a suite that runs a second time over the fake NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--turn", type=int, help="which variants of tests marked by_turns run")
    parser.addoption("--most", type=int, help="of every test so many variants a turn")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turn, most = config.getoption("--turn"), config.getoption("--most")
    if turn is None or any("[" in argument for argument in config.args):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = {id(item) for each in tests.values() for item in of_other_turns(each, turn, most)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def of_other_turns(
    variants: Sequence[pytest.Item], turn: int, most: int | None = None
) -> list[pytest.Item]:
    """Return those of a test's variants that this turn leaves out."""
    mark = variants[0].get_closest_marker("by_turns")
    of = mark.kwargs.get("of") if mark else None
    values = [repr(item.callspec.params[of]) if of else n for n, item in enumerate(variants)]  # type: ignore[attr-defined]
    distinct = list(dict.fromkeys(values))
    limits = [*(mark.args if mark else ()), *([most] if most else ())]
    turns = -(-len(distinct) // min(limits, default=len(distinct)))
    chosen = set(distinct[turn % turns :: turns])
    return [item for item, value in zip(variants, values, strict=True) if value not in chosen]
