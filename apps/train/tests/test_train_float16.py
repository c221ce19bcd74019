"""Training in float16: what the loss scale does, on one process and several."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import runs

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh, spawn
from kenotron_engine import StepResult
from kenotron_train.config_file import load_config
from kenotron_train.run.loop import train

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")
LAYOUTS = {
    "one": {},
    "dp2": {"parallelism__dp": 2, "tokens__micro_batch_size": 1},
    "pp2tp2": {"parallelism__pp": 2, "parallelism__tp": 2},
}
SCALE = "optimizer__loss_scale"


def configure(folder: Path, dtype: str = "float16", **changes: object) -> Config:
    folder.mkdir(exist_ok=True)
    flags = runs.arguments(folder, model__dtype=dtype, tokens__limit_val_batches=0, **changes)
    return load_config(DEFAULT_CONFIG, flags[1::2])


def results(mesh: Mesh, config: Config) -> list[StepResult]:
    return train(mesh, config)


def scales(folder: Path) -> list[float]:
    """That of the step after each."""
    return [step["next_loss_scale"] for step in runs.metrics(folder)]


def run(config: Config) -> list[StepResult]:
    sizes = config.parallelism
    ranks = spawn(results, config, pp=sizes.pp, dp=sizes.dp, tp=sizes.tp, preload=PRELOAD)
    plain = [[repr((r.loss, r.grad_norm, r.overflow)) for r in rank] for rank in ranks]
    assert all(rank == plain[0] for rank in plain)
    return ranks[0]


@pytest.mark.parametrize("fp32", ["true", "false"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float16_follows_float32(layout: str, fp32: str, tmp_path: Path) -> None:
    want = run(configure(tmp_path / "fp32", "float32"))
    added = {"optimizer__accumulate_grad_in_fp32": fp32}
    got = run(configure(tmp_path / "fp16", **LAYOUTS[layout], **added))
    for ours, theirs in zip(got, want, strict=True):
        assert not ours.skipped
        assert ours.loss == pytest.approx(theirs.loss, rel=2e-4)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-2)
    assert [r.loss for r in got] != [r.loss for r in want]
    assert set(scales(tmp_path / "fp16")) == {65536}


def test_gradients_that_vanish_in_float16_live_by_the_scale(tmp_path: Path) -> None:
    """Some gradients of this model are below 6e-8 when nothing multiplies the loss."""
    tiny = {"model__init_method__std": 1e-4}
    want = run(configure(tmp_path / "fp32", "float32", **tiny))[0].grad_norm
    scaled = run(configure(tmp_path / "scaled", **tiny))[0].grad_norm
    assert scaled == pytest.approx(want, rel=1e-2)


@pytest.mark.parametrize("layout", ["one", "pp2tp2"])
def test_overflows_are_left_out_and_halve_the_scale(layout: str, tmp_path: Path) -> None:
    high = {f"{SCALE}__initial": 2.0**40, f"{SCALE}__maximum": 2.0**40, f"{SCALE}__backoff": 2**-9}
    got = run(configure(tmp_path, **LAYOUTS[layout], **high))
    assert [r.overflow for r in got[:2]] == [True, True]
    assert [r.skipped for r in got] == [r.overflow for r in got]
    assert [math.log2(scale) for scale in scales(tmp_path)[:2]] == [31, 22]
    assert got[0].nonfinite and got[0].loss < 10
    assert not got[-1].skipped
    skipped = [step for step in runs.metrics(tmp_path) if step.get("skipped")]
    assert [step["step"] for step in skipped] == [n + 1 for n, r in enumerate(got) if r.overflow]
    assert skipped[0]["next_loss_scale"] == 2.0**31
    # Nothing was learnt before the first update.
    updates = [n for n, r in enumerate(got) if not r.skipped]
    assert updates[0] >= 2


def test_the_scale_grows_and_stands_at_its_limits(tmp_path: Path) -> None:
    limits = {
        f"{SCALE}__initial": 256.0, f"{SCALE}__growth_interval": 2, f"{SCALE}__maximum": 512.0,
    }  # fmt: skip
    run(configure(tmp_path, **limits))
    assert scales(tmp_path) == [256, 512, 512, 512, 512, 512]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_float16_run_is_the_same_to_the_bit(layout: str, tmp_path: Path) -> None:
    changes = {
        **LAYOUTS[layout], f"{SCALE}__initial": 2.0**30, f"{SCALE}__maximum": 2.0**30,
        f"{SCALE}__backoff": 2**-5, f"{SCALE}__growth_interval": 2,
    }  # fmt: skip
    whole = run(configure(tmp_path / "a", **changes))
    assert whole[0].skipped and not whole[-1].skipped
    for name, place in (("b", LAYOUTS[layout]), ("c", LAYOUTS["dp2"])):
        changes |= {"parallelism__dp": 1, "parallelism__pp": 1, "parallelism__tp": 1}
        changes |= {"tokens__micro_batch_size": 2} | place
        resume = {"checkpoints__resume_checkpoint_path": tmp_path / "a/checkpoints/3"}
        rest = run(configure(tmp_path / name, **changes, **resume))
        assert scales(tmp_path / name) == scales(tmp_path / "a")[3:]
        if name == "b":
            assert [(r.loss, r.grad_norm) for r in rest] == [
                (r.loss, r.grad_norm) for r in whole[3:]
            ]
        for ours, theirs in zip(rest, whole[3:], strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)
