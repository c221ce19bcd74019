"""The rank that others wait for is named, and left out where the config asks for it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_train_elastic import BATCH, STEPS, config_of, curve, recoveries

from kenotron_config import Config, ConfigError
from kenotron_dist import Mesh
from kenotron_train.library import train
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.log import instrumentation, rank_times
from kenotron_train.log.rank_times import RankTimes, SlowestRank, microseconds
from kenotron_train.log.stopwatch import StepTimes
from kenotron_train.report.curves import read_runs, summary

HOSTS = ("a", "a", "b", "b")


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> RankTimes:
    """Of two pipeline stages of two ranks each."""
    monkeypatch.setattr(rank_times, "gather_objects", lambda *_: list(HOSTS))
    mesh = SimpleNamespace(world=SimpleNamespace(size=4), config=SimpleNamespace(pp=2))
    return RankTimes(cast(Mesh, mesh))


def rows(*computed: float, data: Sequence[float] = (0, 0, 0, 0)) -> list[list[float]]:
    """A step of one second."""
    return [[1e6, 1e6 * own, 1e6 * each] for own, each in zip(computed, data, strict=True)]


def test_the_slowest_rank_is_compared_with_those_of_its_stage(times: RankTimes) -> None:
    assert times.take() is None
    times.add(rows(0.9, 0.9, 0.2, 0.5))  # the first stage has more to do
    found = times.take()
    assert found == SlowestRank(3, "b", "compute", 0.5, 0.2, 1.0) and not found.is_slow
    times.add(rows(0.5, 0.5, 0.5, 0.5, data=(0.0, 0.4, 0.1, 0.1)))
    times.add(rows(0.5, 0.5, 0.5, 0.5, data=(0.0, 0.4, 0.1, 0.1)))
    found = times.take()
    assert found is not None and str(found) == (
        "rank 1 on host a: 0.9 s of a step of 1 s are its own (data), 0.5 s those of others"
    )
    assert found.is_slow and times.take() is None


def test_a_rank_is_slow_when_it_was_so_in_a_row(times: RankTimes) -> None:
    slow, even = rows(0.9, 0.5, 0.5, 0.5), rows(0.5, 0.5, 0.5, 0.5)
    other = rows(0.5, 0.9, 0.5, 0.5)
    for step in (slow, slow, even, slow, other, other, [[0, 0, 0]] * 4):
        times.add(step)
    assert times.slow_for(3) is None
    found = times.slow_for(2)
    assert found is not None and found.rank == 1
    times.add(even)
    assert times.slow_for(1) is None


def test_own_times_are_those_without_other_ranks() -> None:
    step = StepTimes(1.0, data_wait=0.25, save_blocked=0.5, save_after=0.375, communication=0.5)
    assert microseconds(step) == (1_000_000, 125_000, 250_000)
    unknown = StepTimes(1.0, data_wait=0.25)
    assert microseconds(unknown) == (1_000_000, 0, 250_000)


def test_one_rank_of_a_stage_has_none_to_be_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_times, "gather_objects", lambda *_: ["a", "b"])
    mesh = SimpleNamespace(world=SimpleNamespace(size=2), config=SimpleNamespace(pp=2))
    found = RankTimes(cast(Mesh, mesh))
    found.add(rows(0.9, 0.1, data=(0, 0)))
    assert found.take() is None and found.slow_for(1) is None


@dataclass
class Slow(LifeCycle):
    """Has one rank say that it is slow; its clock is replaced, so that no test depends on one."""

    rank: int

    def pre_init(self, config: Config, mesh: Mesh) -> None:
        """Replace the times of this rank."""
        own = 900_000 if mesh.rank == self.rank else 100_000
        instrumentation.microseconds = lambda times: (1_000_000 * bool(times.step), own, 0)


def trained(folder: Path, ranks: int, **more: Any) -> list[dict[str, Any]]:
    config = config_of(folder, **more)(ranks)
    train(config, hooks=[Slow(1)], ranks=ranks, threads=1)
    return curve(folder)


def test_a_slow_rank_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = trained(tmp_path, 3, parallelism__leave_out_slow=4)
    assert [each["step"] for each in found] == list(range(1, STEPS + 1))
    assert [each["consumed_samples"] for each in found] == [BATCH * n for n in range(1, STEPS + 1)]
    after = recoveries(found)  # times of a step come with the next one
    assert [(step, each["ranks"], each["lost_steps"]) for step, each in after.items()] == [
        (6, 2, 0), (11, 1, 0),
    ]  # fmt: skip
    said = capfd.readouterr().err
    host = socket.gethostname()
    assert f"rank 1 on host {host}: 0.9 s of a step of 1 s are its own (compute), " in said
    assert "those of others, in each of 4 steps; continuing with 2: pp 1 x dp 2 x tp 1" in said
    named = [each["slowest_rank"] for each in found if "slowest_rank" in each]
    assert named[0] == {
        "rank": 1, "host": host, "phase": "compute", "own_s": 0.9, "others_s": 0.1, "step_s": 1.0,
    }  # fmt: skip
    titles, line = summary(read_runs([str(tmp_path / "checkpoints")]))
    column = titles.index("rank that others wait for (share of steps)")
    assert line[column] == f"1 on {host} (compute): 80%"


def test_a_rank_that_the_run_needs_is_named_and_stays(tmp_path: Path) -> None:
    """With tp 2 a single replica is left."""
    found = trained(tmp_path, 2, parallelism__leave_out_slow=2, parallelism__tp=2)
    assert len(found) == STEPS and not recoveries(found)
    said = (tmp_path / "checkpoints/log.txt").read_text()
    assert said.count("in each of 2 steps; it is not left out: parallelism.dp: auto was given") == 1


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"parallelism__leave_out_slow": 0}, "leave_out_slow: 0 was given; it must be at least 1"),
        (
            {"parallelism__leave_out_slow": 3, "parallelism__dp": 2},
            "leave_out_slow: 3 was given; only a run with dp: auto continues with fewer ranks",
        ),
    ],
)
def test_what_cannot_be_is_named(more: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config_of(tmp_path, **more)(2)
