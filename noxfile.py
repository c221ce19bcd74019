"""Everything that is checked; `nox -l` lists it.

Sessions are read from packages/*/pyproject.toml and apps/*/pyproject.toml: a new package is tested
without an edit here. No session reuses an environment: with uv a fresh one takes a second.
"""

import datetime
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import nox

sys.path.append(str(Path(__file__).parent / "tests"))

from grid import SECTIONS
from nox_environments import (
    ALL,
    APPS,
    COMPILED,
    PACKAGES,
    PYREFLY,
    PYTEST,
    ROOT,
    RUFF,
    XDIST,
    build_wheels,
    closure,
    editable,
    install,
    install_tree,
    newest_python,
    scratch,
)
from nox_lanes import REPO_TESTS, TEST_ENV, affected, changed_since, lanes
from nox_release import make_release, run_readme

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"  # uv hard-links torch: many sessions, one copy
nox.options.error_on_external_run = True

# While one starts its processes, others compute. A worker that dies ends the session: pytest-xdist
# 3.8 would start another one and then wait for ever for tests that nobody has.
ONCE_MORE = ("python", str(ROOT / "tests/once_more.py"))  # pytest, and a few failures again
AT_ONCE = ("-n", "auto", "--dist", "loadgroup", "--max-worker-restart=0")
TODAY = f"--turn={datetime.date.today().toordinal()}"

if os.environ.get("PIP_FIND_LINKS"):  # uv reads none of pip's settings
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))


def tests(session: nox.Session, package: Path) -> None:
    """Test one package, installed with only the siblings that it declares."""
    install_tree(session, PYTEST, XDIST, use=closure(package), test=[package])
    session.run(*ONCE_MORE, *AT_ONCE, str(package / "tests"), *session.posargs, env=TEST_ENV)


def packages_after(session: nox.Session) -> list[Path]:
    """The packages and apps that are named after `--`, without ``kenotron-``; else all packages."""
    folders = {folder.name.removeprefix("kenotron-"): folder for folder in ALL}
    if unknown := set(session.posargs) - {*folders}:
        session.error(f"{sorted(unknown)} are no packages: choose of {', '.join(folders)}")
    return [folders[name] for name in session.posargs] or PACKAGES


@nox.session(venv_backend="uv")
def wheels(session: nox.Session) -> None:
    """Install each package's wheel and what it needs, no more; run its README in an empty folder.

    Names of packages after `--` choose some: ``tp``.
    """
    for package in packages_after(session):
        files = build_wheels(session, closure(package))
        pins = tuple(f"{file.name.split('-')[0]} @ {file.as_uri()}" for file in files)
        install(session, "--exact", package.name, pins=pins)
        session.run("uv", "pip", "check")
        run_readme(session, package)


@nox.session(default=False, venv_backend="uv")
def release(session: nox.Session) -> None:
    """Build the packages of the last commit into `dist/`, or a folder after `--`, and try them."""
    make_release(session, Path(*session.posargs or ["dist"]).absolute())


def bench(session: nox.Session, folder: Path) -> None:
    """Run the benchmarks of one package or app, with its own extra `bench`."""
    use = ALL if folder in APPS else closure(folder)
    install_tree(session, use=use, test=[folder], extra="bench")
    for file in sorted(folder.glob("benchmarks/bench_*.py")):
        session.run("python", str(file), *session.posargs)


@nox.session
def repo(session: nox.Session) -> None:
    """Check the shape of the repository: floors, rooms, sizes, versions. Needs no torch."""
    session.install(PYTEST, XDIST)
    session.run("pytest", "-n", "2", "--noconftest", *map(str, REPO_TESTS), *session.posargs)


def check_style(session: nox.Session) -> None:
    """Run both checks of ruff."""
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and layout of the code with ruff."""
    session.install(RUFF)
    check_style(session)


@nox.session(default=False)
def quick(session: nox.Session) -> None:
    """Check a change in minutes: style, types, rooms, and what is marked ``smoke`` everywhere."""
    tools = (PYTEST, XDIST, RUFF, PYREFLY, "types-PyYAML")
    install_tree(session, *tools, use=ALL, test=ALL)
    check_style(session)
    session.run("pyrefly", "check")
    session.run("pytest", "-n", "2", "--noconftest", *map(str, REPO_TESTS), env=TEST_ENV)
    for folder in ALL:
        session.run("pytest", "-m", "smoke", str(folder / "tests"), env=TEST_ENV)


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all packages and apps with pyrefly."""
    install_tree(session, PYREFLY, "types-PyYAML", use=ALL, test=[])
    session.run("pyrefly", "check")


def add(name: str, body: Callable, folder: Path, *, default: bool = True) -> None:
    """Add the session `name`: `body` on one folder."""

    @nox.session(name=name, default=default)
    @functools.wraps(body)
    def session_of_folder(session: nox.Session) -> None:
        body(session, folder)


def run_lanes(session: nox.Session, chosen: dict[str, dict]) -> None:
    """Run the tests of packages and apps in one environment, two folders beside each other."""
    install_tree(session, PYTEST, XDIST, use=ALL, test=ALL)
    file = scratch(session, "lanes") / "lanes.json"
    file.write_text(json.dumps(chosen))
    session.run("python", "tests/lanes.py", str(file), env=TEST_ENV)


def named_lanes(session: nox.Session, *options: str) -> dict[str, dict]:
    """The lanes and folders that are named after `--`, or all lanes."""
    found, folders = lanes(*options), {str(each.relative_to(ROOT)): each for each in ALL}
    if unknown := set(session.posargs) - {*found, *folders}:
        known = ", ".join(dict.fromkeys([*found, *folders]))
        session.error(f"{sorted(unknown)} are no lanes: choose of {known}")
    if not session.posargs:
        return found
    named = [folder for name, folder in folders.items() if name in session.posargs]
    few = lanes(*options, folders=named) if named else {}
    few = {name: lane for name, lane in few.items() if name not in ("across", "over NCCL")}
    return few | {name: found[name] for name in session.posargs if name in found}


@nox.session(name="tests")
def some_variants(session: nox.Session) -> None:
    """Run every test; of those marked ``by_turns`` some variants, other ones every day.

    Names of lanes and folders after `--` choose: ``across``, ``packages/kenotron-tp``.
    """
    run_lanes(session, named_lanes(session, TODAY))


@nox.session(name="tests-all", default=False)
def all_variants(session: nox.Session) -> None:
    """Run every test in all of its variants: before a release."""
    run_lanes(session, named_lanes(session))


@nox.session(name="affected", default=False)
def affected_tests(session: nox.Session) -> None:
    """Run what a change can reach, since the commit after `--`, or since the last one."""
    chosen = affected(changed_since(*(session.posargs or ["HEAD"])), TODAY)
    if not chosen:
        session.skip("no package, app or test changed")
    run_lanes(session, chosen)


for each in PACKAGES:
    add(f"tests-{each.name.removeprefix('kenotron-')}", tests, each, default=False)
for each in ALL:
    if (each / "benchmarks").is_dir():
        add(f"bench-{each.name.removeprefix('kenotron-')}", bench, each, default=False)


@nox.session(name="bench-kernels", default=False)
def bench_kernels(session: nox.Session) -> None:
    """Count the kernels and bytes of a training step on an accelerator; no GPU is needed."""
    install_tree(session, use=ALL, test=[])
    session.run("python", "apps/train/benchmarks/bench_kernels.py", *session.posargs)


@nox.session(name="bench-mup", default=False)
def bench_mup(session: nox.Session) -> None:
    """Check µP: activations move as far at every width, and the best learning rate stays."""
    install_tree(session, use=ALL, test=[])
    for name in ("bench_mup", "bench_mup_rates"):
        session.run("python", f"apps/train/benchmarks/{name}.py", *session.posargs)


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


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Plant known bugs one at a time and see numbers fail: `tests/GRID.md`."""
    install_tree(session, PYTEST, use=ALL, test=ALL)
    session.run("python", "tests/mutants.py", *session.posargs, env=TEST_ENV)


@nox.session(default=False)
def train(session: nox.Session) -> None:
    """Train the embedded default, or what the arguments after `--` say."""
    install_tree(session, use=ALL, test=[])
    session.run("python", "apps/train", *session.posargs)
