"""A pytest plugin: ranks of all tests of a process find loaded what any of them needs.

The first spawn of a process decides: else it would be that of the folder that comes first.
"""

import pytest

LOADED = (
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "torch.testing",
    "kenotron_train.run.loop",
    "transformers.activations",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "hypothesis",
    "pytest",
)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start a rank, in each worker of pytest-xdist."""
    if hasattr(session.config, "workerinput"):
        from kenotron_dist import spawn  # here: the process that hands tests out needs no torch

        spawn(id, preload=LOADED)
