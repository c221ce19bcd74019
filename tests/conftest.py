"""Options of the tests across packages, and what their ranks find loaded."""

from pathlib import Path

import pytest
from grid import SECTIONS
from loaded_ranks import LOADED

from kenotron_dist import spawn


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--grid",
        choices=["chosen", *SECTIONS, "full"],
        default="chosen",
        help="sample, rows that cut samples (context), have experts, other mixers or extras; some "
        "of all these (chosen); full: all pairs on every layout of up to 8 ranks, 20 steps a row",
    )
    parser.addoption(
        "--touched", type=lambda text: text.split(","),
        help="packages that a change touches: of the chosen rows those that use one of them",
    )  # fmt: skip
    parser.addoption(
        "--hf-keys", choices=["some", "all"], default="some",
        help="keys of transformers' config classes that are changed: every n-th, or each",
    )  # fmt: skip
    parser.addoption(
        "--grid-results", type=Path, help="a folder for what was measured, a file a row"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every row of the grid is a test."""
    if "row" in metafunc.fixturenames:
        import grid_choice
        import grid_table

        section = metafunc.config.getoption("--grid")
        touched = metafunc.config.getoption("--touched")
        chosen = grid_choice.touched(touched) if touched else grid_choice.chosen()
        rows = chosen if section == "chosen" else grid_table.rows_of(section)
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
