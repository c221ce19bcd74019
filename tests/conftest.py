"""Options of the tests across packages."""

import pytest


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
