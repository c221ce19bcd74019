"""The session `release` of ``noxfile.py``: builds of a commit, compared, described, installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import release
from nox_environments import ALL, ROOT, closure, install, project, scratch
from nox_lanes import TEST_ENV
from python_examples import python_blocks
from release import Release

if TYPE_CHECKING:
    import nox

HATCHLING = "hatchling==1.33.0"
"""Builds all packages: other versions may write other bytes."""
SBOM = "cyclonedx-bom>=7.5,<8"
FIRST = "kenotron-tp"
"""The package that is installed alone before the others."""


def make_release(session: nox.Session, out: Path) -> None:
    """Build all packages and apps of the last commit into `out`, and try them.

    Untracked files and changes that are not committed are not in it: two exports of the commit are
    built, in two folders, with its time for all files.
    """
    if problem := release.not_ours(out):
        session.error(problem)
    exports = [export(scratch(session, name)) for name in ("first", "second-export")]
    folders = [str(folder.relative_to(ROOT)) for folder in ALL]
    found = release.releases(exports[0], folders, ROOT)
    changed = release.changed_since(ROOT)
    complaints = release.misplaced_tags(found)
    for each in found:
        session.log(release.state(each, changed))
        complaints += release.rules(each, changed)
    stop_at(session, complaints)
    pairs = build_twice(session, found, exports)
    stop_at(session, [text for pair in pairs for text in release.different(*pair)])
    stop_at(session, [t for each, p in zip(found, pairs, strict=True)
                      for t in release.wrong_files(each, p[0])])  # fmt: skip
    files = scratch(session, "files")
    for first, _ in pairs:
        shutil.copytree(first, files, dirs_exist_ok=True)
    install_from(session, release.write_index(files, found), found, files / "sbom")
    release.write_sums(files)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(files, out)
    missing = [each.tag for each in in_order(found) if each.tag not in each.tags]
    session.log(f"{out}: {len(found)} packages, each built twice to the same bytes")
    session.log("tags to be made, in this order: " + (" ".join(missing) or "none"))


def stop_at(session: nox.Session, complaints: list[str]) -> None:
    """End the session with all complaints, if there are any."""
    if complaints:
        session.error("\n".join(complaints))


def in_order(found: list[Release]) -> list[Release]:
    """Sort packages: each after those that it needs."""
    names = list(dict.fromkeys(each.name for folder in ALL for each in closure(folder)))
    names += [project(folder)["name"] for folder in ALL]
    return sorted(found, key=lambda each: names.index(each.name))


def export(folder: Path) -> Path:
    """Fill a folder with the files of the last commit."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", "HEAD"]
    done = subprocess.run(command, capture_output=True, check=True)
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def build_twice(
    session: nox.Session, found: list[Release], exports: list[Path]
) -> list[tuple[Path, Path]]:
    """Build sdist, and a wheel from it, of each package in both exports: two folders of files."""
    pins = scratch(session, "pins") / "pins.txt"
    pins.write_text(f"{HATCHLING}\n")
    when = release.git(ROOT, "log", "-1", "--format=%ct")[0]
    env = os.environ | {"SOURCE_DATE_EPOCH": when, "UV_BUILD_CONSTRAINT": str(pins)}
    builds = [scratch(session, name) for name in ("builds", "builds-again")]

    def build(tree: Path, each: Release, into: Path) -> Path:
        command = ["uv", "build", "--quiet", "--no-create-gitignore"]
        command += [f"--out-dir={into / each.name}", str(tree / each.path)]
        subprocess.run(command, env=env, check=True)
        return into / each.name

    with ThreadPoolExecutor(2) as pool:
        first = pool.map(lambda each: build(exports[0], each, builds[0]), found)
        second = pool.map(lambda each: build(exports[1], each, builds[1]), found)
        return list(zip(first, second, strict=True))


def install_from(session: nox.Session, index: Path, found: list[Release], sbom: Path) -> None:
    """Install each package alone from the index, run its README, and list what is installed.

    The first one is installed by pip, which sees this index only: what others publish is there
    before. No foreign package of one of these names can take its place.
    """
    sbom.mkdir()
    first = next(each for each in found if each.name == FIRST)
    needed = [text for each in closure(ROOT / first.path) for text in project(each)["dependencies"]]
    outside = [text for text in needed if not text.startswith("kenotron-")]
    install(session, "--exact", "pip", *outside)
    alone = {"PIP_CONFIG_FILE": os.devnull}
    pip = ("python", "-m", "pip", "--isolated", "install", f"--index-url={index.as_uri()}")
    session.run(*pip, FIRST, env=alone)
    run_readme(session, ROOT / first.path)
    again = [word for each in found for word in ("--refresh-package", each.name)]
    for each in found:
        wanted = f"{each.name}=={each.version}"
        install(session, "--exact", "--index", index.as_uri(), *again, wanted)
        session.run("uv", "pip", "check")
        run_readme(session, ROOT / each.path)
        kind = "library" if each.path.startswith("packages/") else "application"
        session.run(
            "uv", "tool", "run", "--quiet", "--from", SBOM, "cyclonedx-py", "environment",
            f"--pyproject={each.folder / 'pyproject.toml'}", f"--mc-type={kind}",
            "--output-reproducible", f"--output-file={sbom / each.stem}.cdx.json",
            str(Path(session.bin, "python")),
        )  # fmt: skip


def run_readme(session: nox.Session, package: Path) -> None:
    """Run the Python of a package's README in an empty folder."""
    for code in python_blocks((package / "README.md").read_text()):
        example = scratch(session, "readme") / "example.py"
        example.write_text(code)
        with session.chdir(scratch(session, "empty")):
            session.run("python", str(example), env=TEST_ENV)
