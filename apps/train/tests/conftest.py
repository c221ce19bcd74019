"""What ranks of the tests find loaded."""

import pytest
import warm

from kenotron_dist import spawn


@pytest.fixture(scope="session", autouse=True)
def ranks_share_what_they_load() -> None:
    """The first spawn of a process decides what the ranks of all spawns find loaded."""
    warm.remember()
    spawn(id, preload=("torch._dynamo", "kenotron_train.loop", "pytest"))
