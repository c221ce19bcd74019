"""Steps whose loss or gradient norm is far above that of the last ones."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import pytest
import runs

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh, spawn
from kenotron_engine import NextToken, Parts, StepResult
from kenotron_engine import step as room
from kenotron_train.config_file import load_config
from kenotron_train.run.loop import train

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")
SPIKE = 7
LAYOUTS = [{"dp": 2}, {"pp": 2}]


def configure(folder: Path, sizes: dict[str, int], **changes: object) -> Config:
    folder.mkdir(exist_ok=True)
    axes = {f"parallelism__{axis}": size for axis, size in sizes.items()}
    rows = {"tokens__micro_batch_size": 1} if "dp" in sizes else {}
    guard = {"optimizer__spikes": "{sigma: 20, window: 6}", "tokens__train_steps": 9}
    guard |= {"tokens__limit_val_batches": 0}
    flags = runs.arguments(folder, **(guard | axes | rows | changes))
    return load_config(DEFAULT_CONFIG, flags[1::2])


def spiked(mesh: Mesh, config: Config, times: float = 1000) -> list[StepResult]:
    """Train with a loss that is as many times as large in step 7."""
    right_gradient, right_loss, now = room.gradient, NextToken.loss, 0

    def gradient(training, batch, step, *more):
        nonlocal now
        now = step
        return right_gradient(training, batch, step, *more)

    def loss(self, model, share, count):
        whole, factor = right_loss(self, model, share, count), times if now == SPIKE else 1
        return lambda logits, m: Parts(whole(logits, m).total * factor)

    with (
        mock.patch.object(room, "gradient", gradient),
        mock.patch.object(NextToken, "loss", loss),
    ):
        return train(mesh, config)


def trained(folder: Path, sizes: dict[str, int], **changes: object) -> list[StepResult]:
    ranks = spawn(spiked, configure(folder, sizes, **changes), **sizes, preload=PRELOAD)
    assert all(results == ranks[0] for results in ranks)
    return ranks[0]


def test_a_spike_is_left_out_on_every_layout(tmp_path: Path) -> None:
    one = trained(tmp_path / "1", {})
    assert [bool(result.reason) for result in one] == [n == SPIKE for n in range(1, 10)]
    assert [result.skipped for result in one] == [n == SPIKE for n in range(1, 10)]
    assert one[-1].loss < one[0].loss
    spoiled = trained(tmp_path / "all", {}, optimizer__spikes="null")
    assert spoiled[SPIKE - 1].grad_norm == one[SPIKE - 1].grad_norm
    assert spoiled[-1].loss != one[-1].loss
    steps = runs.metrics(tmp_path / "1")
    assert [m.get("skipped") for m in steps] == [n == SPIKE or None for n in range(1, 10)]
    assert "gradient norm" in steps[SPIKE - 1]["spike"]
    for sizes in LAYOUTS:
        many = trained(tmp_path / "x".join(sizes), sizes)
        assert [r.skipped for r in many] == [r.skipped for r in one]
        assert [r.loss for r in many] == pytest.approx([r.loss for r in one], rel=1e-5)


def test_a_step_that_is_not_finite_is_no_spike(tmp_path: Path) -> None:
    config = configure(tmp_path, {}, optimizer__nonfinite="skip")
    (results,) = spawn(spiked, config, math.inf, preload=PRELOAD)
    assert [result.skipped for result in results] == [n == SPIKE for n in range(1, 10)]
    assert results[SPIKE - 1].nonfinite and not results[SPIKE - 1].reason


def test_a_run_that_resumes_knows_the_last_norms(tmp_path: Path) -> None:
    whole = trained(tmp_path / "1", {}, checkpoints__checkpoint_interval=6)
    again = {"checkpoints__resume_checkpoint_path": tmp_path / "1/checkpoints/6"}
    assert trained(tmp_path / "2", {}, **again) == whole[6:]
    assert whole[6].reason
