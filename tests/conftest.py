"""Options of the tests across packages, and what their ranks find loaded."""

from pathlib import Path

import pytest
from grid import CHECKED

from kenotron_dist import spawn

LOADED = (
    "torch._dynamo",
    "kenotron_train.run.loop",
    "transformers.activations",
    "transformers.models.auto.tokenization_auto",
    "pytest",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--grid",
        choices=["checked", *CHECKED, "full"],
        default="checked",
        help="sample, rows that cut samples (context), have experts, other mixers or extras, or "
        "all of these (checked); full: all pairs on every layout of up to 8 ranks, 20 steps a row",
    )
    parser.addoption(
        "--grid-results", type=Path, help="a folder for what was measured, a file a row"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every row of the grid is a test."""
    if "row" in metafunc.fixturenames:
        import grid_table

        section = metafunc.config.getoption("--grid")
        sections = CHECKED if section == "checked" else [section]
        rows = [row for each in sections for row in grid_table.rows_of(each)]
        metafunc.parametrize("row", rows, ids=str)


@pytest.fixture(scope="session")
def full_grid(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--grid") == "full"


@pytest.fixture(scope="session")
def grid_results(request: pytest.FixtureRequest) -> Path | None:
    folder = request.config.getoption("--grid-results")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def ranks_share_what_they_load() -> None:
    """The first spawn of a process decides what the ranks of all spawns find loaded."""
    spawn(id, preload=LOADED)
