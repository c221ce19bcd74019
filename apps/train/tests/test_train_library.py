"""Training from a program: its model, its data, its hooks; and the optional checks."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh, RankError
from kenotron_dist.placement import named_parameters
from kenotron_train import LifeCycle, OwnData, replay_step, train
from kenotron_train.config_file import load_config
from kenotron_train.replay.replay import replay

EXAMPLE = runs.APP / "examples/own_program"
TP4 = {"parallelism__tp": 4}


def configure(folder: Path, **changes: object) -> Config:
    folder.mkdir(exist_ok=True)
    flags = runs.arguments(folder, **({"tokens__limit_val_batches": 0} | changes))
    return load_config(DEFAULT_CONFIG, flags[1::2])


class Diary(LifeCycle):
    """Writes down what is called, a file for each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, rank: int, *words: object) -> None:
        with (self.folder / f"rank{rank}").open("a") as file:
            file.write(json.dumps(words) + "\n")

    def pre_init(self, config, mesh):
        self.rank = mesh.rank
        self.write(self.rank, "pre_init", config.tokens.train_steps)

    def post_init(self, training):
        self.write(self.rank, "post_init", training.optimizer.steps)

    def pre_training(self, training, progress):
        self.write(self.rank, "pre_training", progress.step)

    def post_train_step(self, training, progress, result):
        self.write(self.rank, "post_train_step", progress.step, training.optimizer.steps)

    def pre_save_checkpoint(self, training, progress):
        self.write(self.rank, "pre_save_checkpoint", progress.step)

    def post_save_checkpoint(self, training, saved):
        there = (saved.folder / "manifest.json").exists()
        self.write(self.rank, "post_save_checkpoint", saved.step, there)

    def post_training(self, training, progress):
        self.write(self.rank, "post_training", progress.step)


def test_seven_moments_are_called_on_every_rank(tmp_path: Path) -> None:
    config = configure(tmp_path, parallelism__pp=2, checkpoints__checkpointing_engine="torch")
    results = train(config, hooks=[Diary(tmp_path)]).results
    assert [r.loss for r in results] == [step["lm_loss"] for step in runs.metrics(tmp_path)]
    want = [["pre_init", 6], ["post_init", 0], ["pre_training", 0]]
    for step in range(1, 7):
        want.append(["post_train_step", step, step])
        if step in (3, 6):
            want += [["pre_save_checkpoint", step], ["post_save_checkpoint", step, True]]
    want.append(["post_training", 6])
    for rank in (0, 1):
        lines = (tmp_path / f"rank{rank}").read_text().splitlines()
        assert list(map(json.loads, lines)) == want


def test_the_example_learns_on_two_stages(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "train.py"), str(EXAMPLE / "config.yaml")]
    done = runs.start(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nats off") == 4
    losses = [step["lm_loss"] for step in runs.metrics(tmp_path, "runs/own_program")]
    assert len(losses) == 40 and losses[-1] < 0.8 * losses[0]


class Spoil(LifeCycle):
    """Changes a norm's weight on one rank after the second step."""

    def post_train_step(self, training, progress, result):
        parameters = named_parameters(training.model.stack)
        if training.mesh.rank == 3 and progress.step == 2:
            with torch.no_grad():
                parameters["layers.1.mlp_norm.weight"][0] += 1


@pytest.mark.parametrize("sizes", [TP4, {"parallelism__dp": 2}, {"parallelism__pp": 2}], ids=str)
def test_a_sound_run_passes_all_checks(sizes: dict, tmp_path: Path) -> None:
    checked = {"general__ignore_sanity_checks": "false"}
    assert len(train(configure(tmp_path, **sizes, **checked)).results) == 6


def test_a_rank_that_differs_is_named_with_the_parameter(tmp_path: Path) -> None:
    checked = {"general__ignore_sanity_checks": "false", "checkpoints__checkpoint_interval": 100}
    with pytest.raises(RankError) as caught:
        train(configure(tmp_path, **TP4, **checked), hooks=[Spoil()])
    assert "after step 3: " in str(caught.value)
    assert "differ, first 'layers.1.mlp_norm.weight' (on rank 3)" in str(caught.value)


def mine(i: int) -> list[int]:
    """Samples that no two processes agree on."""
    return [(i + os.getpid() + j) % 250 for j in range(33)]


def test_ranks_that_read_different_batches_are_found(tmp_path: Path) -> None:
    checked = {
        "general__ignore_sanity_checks": "false", "data_stages__0__data__dataset": "null",
    }  # fmt: skip
    folder = tmp_path
    flags = runs.arguments(folder, **TP4, **checked, tokens__limit_val_batches=0)
    config = load_config(DEFAULT_CONFIG, [f for f in flags[1::2] if "hf_dataset" not in f])
    with pytest.raises(RankError, match="step 1: the batch: .* must be equal over tp .*'labels'"):
        train(config, loader=OwnData(mine, samples=500))


def test_an_update_with_a_gradient_that_is_not_finite_is_found(tmp_path: Path) -> None:
    changes = {
        "general__ignore_sanity_checks": "false", "optimizer__nonfinite": "continue",
        "model__init_method__std": 1e30,
    }  # fmt: skip
    with pytest.raises(RankError, match="step 1: .* and the update was made"):
        train(configure(tmp_path, parallelism__dp=2, **changes))


class Break(LifeCycle):
    """Makes all that comes after the third step nan."""

    def post_train_step(self, training, progress, result):
        if progress.step == 3:
            with torch.no_grad():
                next(training.model.stack.parameters()).fill_(torch.nan)


def test_a_failure_is_kept_and_its_step_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    own = importlib.import_module("train")
    flags = {
        "tokens.train_steps": 6, "checkpoints.checkpoint_interval": 2,
        "checkpoints.checkpoints_path": tmp_path / "checkpoints",
    }  # fmt: skip
    config = load_config(
        EXAMPLE / "config.yaml", [f"{key}={value}" for key, value in flags.items()]
    )
    given = {"model": own.layers, "loader": OwnData(own.sample, samples=2000)}
    with pytest.raises(RankError, match="step 4: .*--replay-step 4 makes it again"):
        train(config, hooks=[Break()], **given)
    failure = json.loads((tmp_path / "checkpoints/failure.json").read_text())
    assert (failure["step"], failure["times"]) == (4, 1)
    found = replay_step(config, 4, **given)
    assert found["parameter"] is None
    record = tmp_path / "checkpoints/nonfinite/step-4.json"
    alone = replace(config, parallelism=replace(config.parallelism, pp=1))
    assert float(replay(Mesh.connect(), alone, 4, **given)["loss"]) == float(found["loss"])
    said = capsys.readouterr().out
    assert f"]: as in {record}: samples\n" in said
    assert f"]: not as in {record}: loss {found['loss']} instead of nan, parameter None " in said
    (stage,) = config.data_stages
    other = replace(stage, data=replace(stage.data, seed=7))
    replay(Mesh.connect(), replace(alone, data_stages=[other]), 4, **given)
    assert f"]: not as in {record}: samples, loss" in capsys.readouterr().out
