"""Environments of the sessions in ``noxfile.py``: which packages there are, and what is installed.

It needs no torch.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nox

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
APPS = sorted(file.parent for file in ROOT.glob("apps/*/pyproject.toml"))
ALL = [*PACKAGES, *APPS]

TORCH = "torch==2.13.0"  # the version that is tested; a local build (2.13.0+cpu) goes before it
CUDA_TORCH = "torch==2.14.1"  # on Linux the index has CUDA builds; no local build has this version
PYTEST = "pytest>=9,<9.2"  # with 9.2, pytest-xdist 3.8 sees no groups (its issue 1386)
XDIST = "pytest-xdist>=3.6,<4"
RUFF = "ruff>=0.17,<0.18"
PYREFLY = "pyrefly>=1.4,<1.5"
SITE = ("mkdocs-material>=9.8,<10", "mkdocstrings>=1,<2", "mkdocstrings-python>=2,<3", "mkdocs<2")
# Tests start many processes: one thread each, and modules are compiled at installation, by uv as by
# pip: each process would compile torch anew, 8 s instead of 3.
COMPILED = {"UV_COMPILE_BYTECODE": "1"}


def project(folder: Path) -> dict:
    """Read the [project] table of a package or an app."""
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def closure(folder: Path) -> list[Path]:
    """List the siblings that a package needs, and those that they need, then the package."""
    declared = " ".join(re.split(r"[^\w-]", text)[0] for text in project(folder)["dependencies"])
    siblings = [package for package in PACKAGES if package.name in declared.split()]
    return list(dict.fromkeys([*(each for s in siblings for each in closure(s)), folder]))


def packages_after(session: nox.Session) -> list[Path]:
    """The packages and apps that are named after `--`, without ``kenotron-``; else all packages."""
    folders = {folder.name.removeprefix("kenotron-"): folder for folder in ALL}
    if unknown := set(session.posargs) - {*folders}:
        session.error(f"{sorted(unknown)} are no packages: choose of {', '.join(folders)}")
    return [folders[name] for name in session.posargs] or PACKAGES


def scratch(session: nox.Session, name: str) -> Path:
    """Make an empty folder for this session; absolute, which nox's own is not."""
    folder = Path(session.create_tmp()).resolve() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def install(
    session: nox.Session, *what: str, pins: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> None:
    """Install `what`; torch and `pins` fix versions only: a constraint installs nothing itself."""
    constraints = scratch(session, "constraints") / "constraints.txt"
    constraints.write_text("\n".join([TORCH, *pins, ""]))
    session.install("--constraint", str(constraints), *what, env=env)


def editable(use: list[Path], test: list[Path], extra: str = "test") -> list[str]:
    """Name the folders of `use` for pip, editable; those in `test` with their `extra`, if any."""
    having = [
        folder for folder in test if extra in project(folder).get("optional-dependencies", {})
    ]
    paths = [f"{folder}[{extra}]" if folder in having else str(folder) for folder in use]
    return [part for path in paths for part in ("--editable", path)]


def install_tree(
    session: nox.Session, *tools: str, use: list[Path], test: list[Path], extra: str = "test"
) -> None:
    """Install the folders of `use` editable; those in `test` with their own `extra`, if any."""
    install(session, *tools, *editable(use, test, extra), env=COMPILED if test else None)


def build_wheels(session: nox.Session, folders: list[Path]) -> list[Path]:
    """Return one wheel a folder, built once in a run of nox; nothing is installed."""
    built = []
    for folder in folders:
        wheels = Path(all_wheels().name, folder.name)
        if not wheels.exists():
            session.run("uv", "build", "--quiet", "--wheel", f"--out-dir={wheels}", str(folder))
        built += wheels.glob("*.whl")
    return sorted(built)


@functools.cache
def all_wheels() -> tempfile.TemporaryDirectory[str]:
    """The folder of the wheels of this run, which goes with it."""
    return tempfile.TemporaryDirectory(prefix="wheels-")


def newest_python() -> str:
    """Name the newest Python on the path; one of pyenv's links may lead nowhere."""
    names = [f"python3.{minor}" for minor in range(19, 10, -1)]
    found = (name for name in names if shutil.which(name))
    runs = (n for n in found if not subprocess.run([n, "-c", ""], capture_output=True).returncode)
    return next(runs, "python3")
