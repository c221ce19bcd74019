"""Options of the tests across packages, and what their ranks find loaded."""

import pytest

from kenotron_dist import spawn

LOADED = ("torch._dynamo", "kenotron_train.loop", "transformers.activations", "pytest")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--grid",
        choices=["sample", "full"],
        default="sample",
        help="full: 20 steps on every layout of 8 ranks too, and every mode on every layout",
    )


@pytest.fixture(scope="session")
def full_grid(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--grid") == "full"


@pytest.fixture(scope="session", autouse=True)
def ranks_share_what_they_load() -> None:
    """The first spawn of a process decides what the ranks of all spawns find loaded."""
    spawn(id, preload=LOADED)
