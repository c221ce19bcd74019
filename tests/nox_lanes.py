"""What the sessions of ``noxfile.py`` test: folders, options and environment of each lane."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nox_environments import ALL, ROOT, closure

REPO_TESTS = [
    ROOT / f"tests/test_{name}.py"
    for name in (
        "api",
        "containers",
        "lock",
        "packages",
        "release",
        "rooms",
        "site",
        "spack",
        "versions",
    )
]  # no torch
TEST_ENV = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    # Where a conftest.py says nothing else; each worker starts several ranks.
    "PYTEST_XDIST_AUTO_NUM_WORKERS": str(min(8, max(3, os.cpu_count() or 1))),
    # A minute of g++ on a cold machine, for programs that take a second to compile without it.
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}

# While one starts its processes, others compute. A worker that dies ends the session: pytest-xdist
# 3.8 would start another one and then wait without end for the tests of the one that died.
AT_ONCE = ("-n", "auto", "--dist", "loadgroup", "--max-worker-restart=0")
OVER_NCCL = [ROOT / f"packages/kenotron-{name}" for name in ("dist", "tp", "pp", "optim")]
CHECKED = [ROOT / f"packages/kenotron-{name}" for name in ("dist", "tp", "cp", "ep")]
"""Their ``conftest.py`` lets torch compare every collective, in the whole process."""
OPTIONS = ("--dist", "loadgroup", "--max-worker-restart=0", "--durations=15", "-p", "by_turns")
WORKERS = {"programs": 3, "communication": 3}
"""Of lanes whose tests wait more than they compute; the others have two."""


def lanes(*options: str, folders: Sequence[Path] = ALL) -> dict[str, dict[str, Any]]:
    """All lanes by name, in an order in which both of those that run at a time end together.

    A lane has several folders, so that few processes import torch and collect tests. Tests of
    apps/train that start programs wait more than they compute: a lane of their own.

    Args:
        options: of pytest.
        folders: packages and apps to be tested.
    """
    programs = _train_files_that_start_programs()
    train = ROOT / "apps/train"
    others = [each for each in folders if each not in (*CHECKED, train)]
    paths = {
        "packages": [str(each / "tests") for each in others],
        "apps/train": [str(train / "tests"), *(f"--ignore={file}" for file in programs)],
        "across": _tests_across(),
        "communication": [str(each / "tests") for each in CHECKED if each in folders],
        "programs": [str(file) for file in programs],
        "over NCCL": ["--most=1", "-m", "not gloo", *_files_that_communicate()],
    }
    without = [] if train in folders else ["apps/train", "programs"]
    without += [] if {*OVER_NCCL} & {*folders} else ["over NCCL"]
    loaded = {"packages": ("-p", "loaded_ranks")}
    environment = {"PYTHONPATH": str(ROOT / "tests")}
    found = {
        name: {
            "arguments": [
                "-n", str(WORKERS.get(name, 2)), *OPTIONS, *loaded.get(name, ()), *options, *each,
            ],
            "environment": dict(environment),
        }
        for name, each in paths.items()
        if each and name not in without
    }  # fmt: skip
    if "over NCCL" in found:
        found["over NCCL"]["environment"]["KENOTRON_DEBUG"] = "fake_nccl"
    return found


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
    changed = {"/".join(file.split("/")[:2]) for file in files}
    folders = {each.relative_to(ROOT).as_posix(): each for each in ALL}
    of_tests = any(each.startswith("tests/") for each in changed)
    if not changed & folders.keys() and not of_tests:
        return {}
    reached = [
        folder
        for folder in ALL
        if changed & {each.relative_to(ROOT).as_posix() for each in closure(folder)}
    ]
    found = lanes(*options, folders=reached)
    touched = sorted(name.removeprefix("packages/kenotron-") for name in changed & folders.keys())
    if touched and not of_tests:
        found["across"]["arguments"].append(f"--touched={','.join(touched)}")
    return found


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
