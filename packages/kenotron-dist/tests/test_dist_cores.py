"""How many threads a rank computes with when nobody says it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kenotron_dist import Mesh, MeshConfig, cores, start
from kenotron_dist.launch import threads_of_rank


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two hardware threads each, of which the process may use six threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5, 6}, raising=False)
    for number in range(8):
        folder = tmp_path / f"devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "want"),
    [("max 100000", 3), ("150000 100000", 2), ("800000 100000", 3), ("1000 100000", 1), ("?", 3)],
)
def test_cores_are_those_of_the_affinity_within_the_quota(
    system: Path, quota: str, want: int
) -> None:
    (system / "fs/cgroup/cpu.max").write_text(quota + "\n")
    assert cores.usable_cores(system) == want


def test_without_the_systems_files_processors_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 7}, raising=False)
    assert cores.usable_cores(tmp_path) == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert cores.usable_cores(tmp_path) == 5


def test_ranks_share_the_cores_unless_the_environment_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kenotron_dist.launch.usable_cores", lambda: 6)
    assert [threads_of_rank(ranks, {}) for ranks in (1, 2, 4, 6, 100)] == [6, 3, 1, 1, 1]
    assert threads_of_rank(2, {"OMP_NUM_THREADS": "5"}) == 5
    assert threads_of_rank(2, {"OMP_NUM_THREADS": "4,2"}) == 4
    for text in ("0", "many", "-1", "99999999999", "9" * 5000):
        words = f"OMP_NUM_THREADS={text}: give a number from 1 to 4096, or unset it"
        with pytest.raises(ValueError, match=words):
            threads_of_rank(1, {"OMP_NUM_THREADS": text})


def threads(mesh: Mesh) -> int:
    return torch.get_num_threads()


def test_started_ranks_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert start(threads, config=MeshConfig(), device="cpu") == 3
    assert start(threads, config=MeshConfig(dp=2), device="cpu", threads=2) == 2
    with pytest.raises(ValueError, match="threads=99999999999: give a number from 1 to 4096"):
        start(threads, config=MeshConfig(), device="cpu", threads=99999999999)


def test_launched_ranks_get_them(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from kenotron_dist import MeshConfig, shutdown, start\n"
        "def threads(mesh): return torch.get_num_threads()\n"
        "try: print(start(threads, config=MeshConfig(), device='cpu', threads=3))\n"
        "finally: shutdown()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "3", done.stderr
