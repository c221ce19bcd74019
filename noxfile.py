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

import nox_before_release  # noqa: F401 - more sessions
from nox_environments import (
    ALL,
    APPS,
    PACKAGES,
    PYREFLY,
    PYTEST,
    ROOT,
    RUFF,
    SITE,
    XDIST,
    build_wheels,
    closure,
    install,
    install_tree,
    packages_after,
    scratch,
)
from nox_lanes import AT_ONCE, REPO_TESTS, TEST_ENV, affected, changed_since, lanes
from nox_release import run_readme

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"  # uv hard-links torch: many sessions, one copy
nox.options.error_on_external_run = True

ONCE_MORE = ("python", str(ROOT / "tests/once_more.py"))  # pytest, and a few failures again
TODAY = f"--turn={datetime.date.today().toordinal()}"

if os.environ.get("PIP_FIND_LINKS"):  # uv reads none of pip's settings
    os.environ.setdefault("UV_FIND_LINKS", ",".join(os.environ["PIP_FIND_LINKS"].split()))


def tests(session: nox.Session, package: Path) -> None:
    """Test one package, installed with only the siblings that it declares."""
    install_tree(session, PYTEST, XDIST, use=closure(package), test=[package])
    session.run(*ONCE_MORE, *AT_ONCE, str(package / "tests"), *session.posargs, env=TEST_ENV)


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


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site in ``build/docs/site``; a warning or a broken link fails."""
    session.install(PYTEST, RUFF, *SITE)
    session.run("python", "tests/site_pages.py", "build/docs")
    build = ("mkdocs", "build", "--strict", "--config-file", "build/docs/mkdocs.yml")
    session.run(*build, env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "tests/site_pages.py", "build/docs", "--built")


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
    """Run the tests; of costly ones (``tests/by_turns.py``) some, other ones every day.

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


@nox.session(name="bench-elastic", default=False)
def bench_elastic(session: nox.Session) -> None:
    """Compare goodput while ranks are killed with torchrun that restarts from the disk."""
    install_tree(session, use=ALL, test=[])
    session.run("python", "apps/train/benchmarks/run_goodput.py", *session.posargs)


@nox.session(name="bench-copies", default=False)
def bench_copies(session: nox.Session) -> None:
    """Measure what a copy in memory after every step costs."""
    install_tree(session, use=ALL, test=[])
    session.run("python", "apps/train/benchmarks/run_memory_copies.py", *session.posargs)


@nox.session(default=False)
def train(session: nox.Session) -> None:
    """Train the embedded default, or what the arguments after `--` say."""
    install_tree(session, use=ALL, test=[])
    session.run("python", "apps/train", *session.posargs)
