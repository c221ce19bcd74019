"""One thread a process, as ranks have: LayerNorm's weight gradient adds up by thread."""

import pytest
import torch

from kenotron_dist.testing import on_ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def ranks_share_what_they_load() -> None:
    """The first call in a process decides what the ranks of all calls find loaded."""
    on_ranks(id, preload=("kenotron_optim",))
