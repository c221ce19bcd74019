"""Sessions of nox that take half an hour and more: before a release, or once the core changed."""

from pathlib import Path

import nox
from grid import SECTIONS
from nox_environments import (
    ALL,
    APPS,
    COMPILED,
    CUDA_TORCH,
    PYTEST,
    XDIST,
    closure,
    editable,
    install_tree,
    newest_python,
    packages_after,
    scratch,
)
from nox_lanes import AT_ONCE, TEST_ENV
from nox_release import make_release


def versions(session: nox.Session, section: str, *options: str) -> None:
    """Test packages one by one, each with only what it declares; write `tests/VERSIONS.md`.

    Names of packages and apps after `--` choose some; the rows of the others stay as they are.
    """
    results = scratch(session, "results")
    for folder in packages_after(session):
        result = results / f"{folder.name}.xml"
        use = ALL if folder in APPS else closure(folder)
        what = (PYTEST, XDIST, *editable(use, [folder]))
        session.install("--exact", "--upgrade", *options, *what, env=COMPILED)
        session.run(
            "pytest", "-n", "2", "--dist", "loadgroup", f"--junit-xml={result}",
            str(folder / "tests"), env=TEST_ENV, success_codes=[0, 1],
        )  # fmt: skip
        session.run("python", "tests/version_table.py", section, str(folder), str(result))
    session.run("python", "tests/version_table.py", section)


@nox.session(name="tests-oldest", default=False, python="3.11", venv_backend="uv")
def tests_oldest(session: nox.Session) -> None:
    """Test packages with the oldest versions that they declare: `tests/VERSIONS.md`."""
    versions(session, "oldest", "--resolution", "lowest-direct")


@nox.session(name="tests-newest", default=False, python=newest_python(), venv_backend="uv")
def tests_newest(session: nox.Session) -> None:
    """Test packages with the newest versions there are: `tests/VERSIONS.md`."""
    versions(session, "newest")


def measure(session: nox.Session, section: str) -> None:
    """Run a part of the grid and write what was measured into `tests/GRID.md`."""
    install_tree(session, PYTEST, XDIST, use=ALL, test=ALL)
    results = scratch(session, "results")
    rows = ("tests/test_parity.py", "-k", "a_row_has", f"--grid={section}")
    patience = ("-o", "faulthandler_timeout=1800")  # for 20 steps of eight ranks on two cores
    codes = [*range(2)]  # rows that fail belong into the table, too
    session.run(
        "pytest", *AT_ONCE, *rows, *patience, "--grid-results", str(results), *session.posargs,
        env=TEST_ENV, success_codes=codes,
    )  # fmt: skip
    session.run("python", "tests/grid_table.py", section, str(results))
    verified = ("tests/test_parity.py", "-k", "a_row_is", f"--grid={section}")
    session.run("pytest", *AT_ONCE, *verified, *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def grid(session: nox.Session) -> None:
    """Measure all rows of the grid, of which `tests` checks some: `tests/GRID.md`."""
    for section in SECTIONS:
        measure(session, section)


@nox.session(name="grid-full", default=False)
def grid_full(session: nox.Session) -> None:
    """Measure every layout of up to eight ranks, 20 steps a row: `tests/GRID.md`."""
    measure(session, "full")


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Compare random trainings with one process; `-- --count 200` before a release."""
    install_tree(session, PYTEST, use=ALL, test=ALL)
    session.run("python", "tests/fuzz.py", *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def memory(session: nox.Session) -> None:
    """See that ranks occupy no more after 2,000 steps than after 20."""
    install_tree(session, PYTEST, use=ALL, test=ALL)
    env = TEST_ENV | {"KENOTRON_MEMORY_STEPS": "2000"}
    patience = "faulthandler_timeout=3600"
    session.run("pytest", "apps/train/tests/test_train_memory.py", "-o", patience, env=env)


@nox.session(name="elastic-proof", default=False)
def elastic_proof(session: nox.Session) -> None:
    """Kill and stop ranks of a run 20 times; nightly: `-- --rounds 50 --minutes 480`."""
    install_tree(session, PYTEST, use=ALL, test=ALL)
    session.run("python", "apps/train/tests/elastic_proof.py", *session.posargs, env=TEST_ENV)


@nox.session(name="bits-proof", default=False)
def bits_proof(session: nox.Session) -> None:
    """Train 200 steps on twelve layouts, all with the bits of one process: `tests/GRID.md`."""
    install_tree(session, PYTEST, use=ALL, test=ALL)
    session.run("python", "tests/bits_proof.py", *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Plant known bugs one at a time and see numbers fail: `tests/GRID.md`."""
    install_tree(session, PYTEST, use=ALL, test=ALL)
    session.run("python", "tests/mutants.py", *session.posargs, env=TEST_ENV)


@nox.session(name="tests-fake-cuda", default=False)
def tests_fake_cuda(session: nox.Session) -> None:
    """Take the GPU paths on tensors without values, in a CUDA build of torch; needs no GPU."""
    session.install(CUDA_TORCH, PYTEST, *editable(ALL, ALL), env=COMPILED)
    session.run("python", "-c", "import torch; assert torch.version.cuda, torch.__version__")
    session.run("pytest", "tests/test_fake_cuda.py", *session.posargs, env=TEST_ENV)


@nox.session(default=False, venv_backend="uv")
def release(session: nox.Session) -> None:
    """Build the packages of the last commit into `dist/`, or a folder after `--`, and try them."""
    make_release(session, Path(*session.posargs or ["dist"]).absolute())
