"""One thread a process, and the same examples on every machine."""

import os

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# Collectives that do not match become an error that names them, at some milliseconds each.
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
settings.register_profile("house", derandomize=True, deadline=None, max_examples=200)
settings.load_profile("house")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means here: many of these tests wait for a limit while others compute."""
    return 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait longest come first: nobody waits for them alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_dist_rendezvous.py")
