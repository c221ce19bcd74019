"""What ranks of the tests find loaded."""

import pytest

from kenotron_dist import spawn

LOADED = (
    "torch._dynamo",  # torch.utils.checkpoint asks for it: more than a second in each rank
    "torch.fx.experimental.symbolic_shapes",
    "kenotron_models",
    "pytest",
)


@pytest.fixture(scope="session", autouse=True)
def ranks_share_what_they_load() -> None:
    """The first spawn of a process decides what the ranks of all spawns find loaded."""
    spawn(id, preload=LOADED)
