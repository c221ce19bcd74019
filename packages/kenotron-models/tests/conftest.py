"""What ranks of the tests find loaded."""

import pytest

from kenotron_dist.testing import on_ranks


@pytest.fixture(scope="session", autouse=True)
def ranks_share_what_they_load() -> None:
    """The first call in a process decides what the ranks of all calls find loaded."""
    on_ranks(id, preload=("torch.fx.experimental.symbolic_shapes", "kenotron_models"))
