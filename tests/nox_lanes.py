"""What the sessions of ``noxfile.py`` test: folders, options and environment of each lane."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nox_environments import ALL, ROOT, closure

REPO_TESTS = [
    ROOT / f"tests/test_{name}.py"
    for name in ("api", "lock", "packages", "rooms", "site", "spack", "versions")
]  # no torch
TEST_ENV = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    # Where a conftest.py says nothing else; each worker starts several ranks.
    "PYTEST_XDIST_AUTO_NUM_WORKERS": str(min(8, max(3, os.cpu_count() or 1))),
    # A minute of g++ on a cold machine, for programs that take a second to compile without it.
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}

OVER_NCCL = [ROOT / f"packages/kenotron-{name}" for name in ("dist", "tp", "pp", "optim")]
OPTIONS = ("--dist", "loadgroup", "--max-worker-restart=0", "--durations=15", "-p", "by_turns")
WORKERS = {"programs": 3, "packages/kenotron-dist": 4}
"""Of lanes whose tests wait more than they compute; the others have two."""


def lanes(*options: str) -> dict[str, dict[str, Any]]:
    """All lanes by name: what `tests/lanes.py` runs, the longest first.

    Tests of apps/train that start programs wait more than they compute: a lane of their own.
    """
    programs = _train_files_that_start_programs()
    folders = {"across": _tests_across(), "programs": [str(file) for file in programs]}
    folders |= {each.relative_to(ROOT).as_posix(): [str(each / "tests")] for each in reversed(ALL)}
    folders["apps/train"] += [f"--ignore={file}" for file in programs]
    environment = {"PYTHONPATH": str(ROOT / "tests")}
    found = {
        name: {
            "arguments": ["-n", str(WORKERS.get(name, 2)), *OPTIONS, *options, *paths],
            "environment": environment,
        }
        for name, paths in folders.items()
    }
    over_nccl = [
        "-n",
        "2",
        *OPTIONS,
        *options,
        "--most=2",
        "-m",
        "not gloo",
        *_files_that_communicate(),
    ]
    fake = environment | {"KENOTRON_DEBUG": "fake_nccl"}
    return found | {"over NCCL": {"arguments": over_nccl, "environment": fake}}


def changed_since(commit: str) -> list[str]:
    """Files that differ from a commit, those that git does not know among them."""
    asked = (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"])
    run = [
        subprocess.run(["git", *each], cwd=ROOT, capture_output=True, text=True, check=True)
        for each in asked
    ]
    return [line for each in run for line in each.stdout.splitlines()]


def affected(files: Iterable[str], *options: str) -> dict[str, dict[str, Any]]:
    """The lanes that a change of these files can reach: its packages and those that need them.

    The rows of the grid are those that use what it touches (``--touched``).
    """
    found, changed = lanes(*options), {"/".join(file.split("/")[:2]) for file in files}
    folders = {each.relative_to(ROOT).as_posix(): each for each in ALL}
    if not changed & folders.keys() and not any(each.startswith("tests/") for each in changed):
        return {}
    reached = {
        name
        for name, folder in folders.items()
        if changed & {each.relative_to(ROOT).as_posix() for each in closure(folder)}
    }
    reached |= {"across"}
    if reached & {each.relative_to(ROOT).as_posix() for each in OVER_NCCL}:
        reached.add("over NCCL")
    if "apps/train" in reached:
        reached.add("programs")
    touched = sorted(name.removeprefix("packages/kenotron-") for name in changed & folders.keys())
    if touched and not any(each.startswith("tests/") for each in changed):
        found["across"]["arguments"].append(f"--touched={','.join(touched)}")
    return {name: lane for name, lane in found.items() if name in reached}


def _train_files_that_start_programs() -> list[Path]:
    """Files of apps/train's tests that start launchers, terminals, clusters or other programs."""
    starts = re.compile(r"\b(subprocess|warm|launchers|two_hosts|slurm_cluster)\b")
    files = sorted(ROOT.glob("apps/train/tests/test_*.py"))
    return [file for file in files if starts.search(file.read_text())]


def _tests_across() -> list[str]:
    """Files of the tests across packages that need torch."""
    return [str(file) for file in sorted(ROOT.glob("tests/test_*.py")) if file not in REPO_TESTS]


def _files_that_communicate() -> list[str]:
    """Files of tests that run over the fake NCCL, too: what needs no GPU goes wrong here.

    Left out: what starts no ranks, starting and ending them, what each computes alone. Tests marked
    ``gloo`` give the reason why they are left out.
    """
    starting = ("gloo_threads", "launch", "rendezvous", "messages", "signals", "signed", "spawn")
    alone = ("compact_state", "freed", "fused", "memory", "products", "matmul", "update_rule")
    return [
        str(file)
        for package in OVER_NCCL
        for file in sorted(package.glob("tests/test_*.py"))
        if not file.stem.endswith((*starting, *alone, "nccl"))
        and re.search(r"\b(on_ranks|spawn)\(", file.read_text())
    ]
