"""Copies in memory on the next host: a run outlives a host, its memory and its processes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from host_runs import VARIABLE, Lost, NoRoom, train_on_hosts
from test_train_elastic import check, config_of, curve, undisturbed

from kenotron_dist import RankError
from kenotron_train.life_cycle import LifeCycle

__all__ = ["undisturbed"]  # a fixture
KEYS = {
    "checkpoints__memory_every": 1, "checkpoints__memory_path": f"${VARIABLE}",
    "checkpoints__checkpoint_interval": 7, "optimizer__zero_stage": 1,
}  # fmt: skip


def hosts(folder: Path, *ranks: int) -> list[Path]:
    """Memory of each rank's host: ``ranks`` are on each."""
    return [folder / f"host{n}" for n, count in enumerate(ranks) for _ in range(count)]


def start(
    folder: Path, ranks: Iterable[int], *hooks: LifeCycle, **more: Any
) -> tuple[int, list[dict[str, Any]]]:
    """Start a run to its end: the step that it resumed from, and its curve."""
    ranks, log = tuple(ranks), folder / "checkpoints/log.txt"
    before = log.read_text() if log.exists() else ""
    train_on_hosts(config_of(folder, **KEYS | more)(sum(ranks)), hosts(folder, *ranks), hooks)
    said = log.read_text().removeprefix(before)
    return sum(map(int, re.findall(r"Resumed after step (\d+) from", said))), curve(folder)


def lose(folder: Path, ranks: Iterable[int], step: int, dead: Iterable[int], **more: Any) -> None:
    """Start a run and kill ranks of it after a step."""
    with pytest.raises(RankError, match="SIGKILL"):
        start(folder, ranks, Lost(step, tuple(dead)), NoRoom(2, 3), **more)


@pytest.mark.parametrize(
    ("more", "late"),
    [
        ({"checkpoints__checkpointing_engine": "torch"}, 0),
        ({"checkpoints__checkpointing_engine": "datastates", "parallelism__pp": 2}, 1),
    ],
    ids=["waited for", "background"],
)
def test_a_host_is_lost(
    more: dict[str, Any], late: int, tmp_path: Path, undisturbed: Callable
) -> None:
    """Its memory, too. Another one comes for it; then the first one is lost for good.

    ``late``: steps by which copies may be older, since they are made during the next step.
    """
    lose(tmp_path, (2, 2), 5, (2, 3), **more)
    said = (tmp_path / "checkpoints/log.txt").read_text()
    failed = r"no copy in memory: step (\d) was not saved: rank 3: \[Errno 28\] No space left"
    assert 2 - late <= int(re.findall(failed, said)[0]) <= 2
    shutil.rmtree(tmp_path / "host1")
    lose(tmp_path, (2, 2), 8, (1, 2), **more)  # of both hosts at once; their memories stay
    lose(tmp_path, (2, 2), 11, (0, 1), **more)
    said = (tmp_path / "checkpoints/log.txt").read_text()
    for found, step in zip(re.findall(r"Resumed after step (\d+) from", said), (4, 7), strict=True):
        assert step - late <= int(found) <= step
    (tmp_path / "host0").rename(tmp_path / "lost")
    (tmp_path / "host1").rename(tmp_path / "host0")
    step, found = start(tmp_path, (2,), **more)
    assert 10 - late <= step <= 10
    few = {key: value for key, value in more.items() if "pp" in key}
    check(found, undisturbed(2 if few else 1, **few))
    assert not [each for each in (tmp_path / "host0").iterdir() if each.is_dir()]
