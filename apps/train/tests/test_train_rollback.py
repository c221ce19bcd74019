"""Batches that make a step nan: runs go back and leave them out; records; replays."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import runs
import torch

from kenotron_ckpt import read_manifest
from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_data import Cursor
from kenotron_dist import Mesh, RankError, spawn
from kenotron_engine import NextToken, Parts
from kenotron_train.config_file import load_config
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.replay import replay
from kenotron_train.run import loop, session

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")
LAYOUTS = {
    "one": {},
    "dp2": {"parallelism__dp": 2, "tokens__micro_batch_size": 1},
    "pp2tp2": {"parallelism__pp": 2, "parallelism__tp": 2},
}
BAD = Cursor(consumed=16)
"""Where the fifth batch of four samples begins."""


def configure(folder: Path, layout: str, **changes: object) -> Config:
    folder.mkdir(exist_ok=True)
    changes = {"optimizer__nonfinite": "rollback", "tokens__limit_val_batches": 0} | changes
    flags = runs.arguments(folder, **LAYOUTS[layout], **changes)
    return load_config(DEFAULT_CONFIG, flags[1::2])


def poison(sample: int | None):
    """A loss that is nan for batches with a sample (None: all)."""
    right = NextToken.loss

    def loss(self, model, share, count):
        whole = right(self, model, share, count)
        if sample is not None and all(sample not in micro.samples_B for micro in share.micros):
            return whole
        return lambda logits, m: Parts(whole(logits, m).total * math.nan)

    return mock.patch.object(NextToken, "loss", loss)


def train(mesh: Mesh, config: Config, sample: int | None) -> list[tuple]:
    with poison(sample):
        return [(r.loss, r.grad_norm, r.lr) for r in loop.train(mesh, config)]


class Looks(LifeCycle):
    """Notes which copies are in memory after each step, before it has its own."""

    def __init__(self, memory: Path) -> None:
        self._memory, self.seen = memory, list[tuple[int, list[int]]]()

    def post_train_step(self, training, progress, result):
        found = [int(each.name) for each in self._memory.glob("*/*") if each.name.isdecimal()]
        self.seen.append((progress.step, found))


def test_copies_in_memory_of_undone_steps_go(tmp_path: Path) -> None:
    """The fifth step is undone down to step 3: the copy of step 4 is of another course."""
    (tmp_path / "memory").mkdir()
    changes = {"memory_every": 1, "memory_path": tmp_path / "memory", "checkpoint_interval": 3}
    changes |= {"checkpointing_engine": "torch"}
    config = configure(
        tmp_path, "one", tokens__train_steps=6,
        **{f"checkpoints__{name}": value for name, value in changes.items()},
    )  # fmt: skip
    looks = Looks(tmp_path / "memory")
    with poison(BAD.consumed):
        loop.run(Mesh.connect(), config, hooks=(looks,))
    assert looks.seen == [(1, []), (2, [1]), (3, [2]), (4, [2]), (4, []), (5, [4]), (6, [5])]


def left_out(mesh: Mesh, config: Config) -> list[tuple]:
    """A run that leaves the fifth batch out from the beginning."""
    right = session.resume

    def resume(training, **asked):
        progress, remark = right(training, **asked)
        return replace(progress, left_out=(BAD,)), remark

    with mock.patch.object(session, "resume", resume):
        return [(r.loss, r.grad_norm, r.lr) for r in loop.train(mesh, config)]


def replayed(mesh: Mesh, config: Config, sample: int | None, step: int) -> dict:
    with poison(sample):
        return replay.replay(mesh, config, step)


def run(call, config: Config, *arguments) -> list:
    sizes = config.parallelism
    sizes = {"pp": sizes.pp, "dp": sizes.dp, "tp": sizes.tp}
    ranks = spawn(call, config, *arguments, **sizes, preload=PRELOAD)
    assert all(repr(rank) == repr(ranks[0]) for rank in ranks)
    return ranks[0]


@pytest.mark.parametrize("engine", ["torch", "datastates"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rollback_is_as_if_the_batch_had_never_been(
    layout: str, engine: str, tmp_path: Path
) -> None:
    changes = {"checkpoints__checkpointing_engine": engine}
    want = run(left_out, configure(tmp_path / "a", layout, **changes))
    ordinary = run(train, configure(tmp_path / "b", layout, **changes), -7)
    bad = json.loads((path_of_record(tmp_path / "c", layout, changes)).read_text())
    got = [(s["lm_loss"], s["grad_norm"], s["lr"]) for s in runs.metrics(tmp_path / "c")]
    assert got == want and len(want) == 6
    assert got[:4] == ordinary[:4] and got[4][0] != ordinary[4][0]
    assert [s["step"] for s in runs.metrics(tmp_path / "c")] == [1, 2, 3, 4, 5, 6]
    assert bad["step"] == 5 and len(bad["samples"]) == 4 and bad["loss"] == "nan"
    assert Cursor(**bad["cursor"]) == BAD
    state = read_manifest(tmp_path / "c/checkpoints/6").state
    assert state["cursor"]["consumed"] == 28 and state["left_out"] == [BAD.to_dict()]


def path_of_record(folder: Path, layout: str, changes: dict) -> Path:
    """Of a run whose fifth batch is bad."""
    config = configure(folder, layout, **changes)
    run(train, config, 17)
    return folder / "checkpoints/nonfinite/step-5.json"


def test_a_run_goes_back_only_so_often(tmp_path: Path) -> None:
    changes = {"checkpoints__save_initial_state": "true", "optimizer__max_rollbacks": 2}
    config = configure(tmp_path, "pp2tp2", **changes)
    with pytest.raises(RankError, match="step 1: .*the run has gone back 2 times, and optimizer"):
        run(train, config, None)


def test_going_back_to_before_the_first_update(tmp_path: Path) -> None:
    changes = {"checkpoints__save_initial_state": "true", "checkpoints__checkpoint_interval": 100}
    got = run(train, configure(tmp_path / "a", "dp2", **changes), 17)
    assert got == run(left_out, configure(tmp_path / "b", "dp2", **changes))


def test_there_must_be_a_checkpoint_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="no checkpoint in .* set checkpoints.save_initial_state"):
        run(train, configure(tmp_path, "one"), None)


@pytest.mark.parametrize("layout", ["one", "pp2tp2"])
def test_a_step_is_replayed_from_its_record(layout: str, tmp_path: Path) -> None:
    config = configure(tmp_path, layout, optimizer__nonfinite="error")
    with pytest.raises(RankError, match=r"step 5: .*step-5\.json, and --replay-step 5 makes it"):
        run(train, config, 17)
    metrics = runs.metrics(tmp_path)
    record = json.loads((tmp_path / "checkpoints/nonfinite/step-5.json").read_text())
    found = run(replayed, config, 17, 5)
    assert {key: found[key] for key in record} == record and record["loss"] == "nan"
    assert all(norm == "nan" for norm in found["grad_norms"].values())
    before = run(replayed, config, 17, 4)  # an ordinary step: the norm of the run's own
    assert (float(before["loss"]), float(before["grad_norm"])) == (
        metrics[3]["lm_loss"], metrics[3]["grad_norm"],
    )  # fmt: skip
    assert before["parameter"] is None and before["module"] == ""
    assert runs.metrics(tmp_path) == metrics
    with pytest.raises(RankError, match="--replay-step 7: the run has steps 1 to"):
        run(replayed, config, 17, 7)


def broken(mesh: Mesh, config: Config, path: str) -> list:
    """A weight is inf on the rank that has it, after the model is built."""
    right = session.build_training

    def build(config, mesh, *own):
        training = right(config, mesh, *own)
        parameters = dict(training.model.stack.named_parameters())
        if path in parameters:
            with torch.no_grad():
                parameters[path].view(-1)[0] = math.inf
            training.optimizer.reload()
        return training

    with mock.patch.object(session, "build_training", build):
        return loop.train(mesh, config)


@pytest.mark.parametrize("layout", ["one", "pp2tp2"])
def test_the_first_module_that_is_not_finite_is_named(layout: str, tmp_path: Path) -> None:
    config = configure(tmp_path, layout, optimizer__nonfinite="error")
    with pytest.raises(RankError, match=r"first module: layers\.1\.attention\.out"):
        run(broken, config, "layers.1.attention.out.weight")


def test_a_run_that_went_back_never_returns_to_what_came_after(tmp_path: Path) -> None:
    often = {"checkpoints__checkpoint_interval": 2}
    run(train, configure(tmp_path, "one", **often), -7)
    given = {"checkpoints__resume_checkpoint_path": tmp_path / "checkpoints/2"}
    for step in (2, 4, 6):
        assert (tmp_path / f"checkpoints/{step}").is_dir()
    other = {"optimizer__learning_rate_scheduler__learning_rate": 1e-3}
    got = run(train, configure(tmp_path, "one", **often, **given, **other), 16)
    assert len(got) == 4  # 3 to 6: from 4, not from the other branch's 6
    assert [step["step"] for step in runs.metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
