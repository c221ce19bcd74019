"""What ranks of the tests find loaded, and in the environment."""

from collections.abc import Iterator

import pytest
import warm

from kenotron_dist import spawn

LOADED = (
    "torch._dynamo",
    "kenotron_train.run.loop",
    "transformers.activations",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "pytest",
)


@pytest.fixture(scope="session", autouse=True)
def ranks_share_what_they_load() -> None:
    """The first spawn of a process decides what the ranks of all spawns find loaded."""
    warm.remember()
    spawn(id, preload=LOADED)


@pytest.fixture(autouse=True)
def no_test_changes_the_environment_of_the_next() -> Iterator[None]:
    """Else the next would start its programs anew, without what the worker has loaded."""
    yield
    warm.restore()
