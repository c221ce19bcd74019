"""Steps whose loss or gradient is nan on one rank, and batches with few targets or none."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import runs
import torch

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_data import Cursor
from kenotron_dist import Mesh, RankError, spawn
from kenotron_engine import NextToken, Parts, StepResult
from kenotron_engine import step as room
from kenotron_optim import LRSchedule, NonFinite, learning_rate
from kenotron_train.config_file import load_config
from kenotron_train.failures.nonfinite_record import Blame, _origins
from kenotron_train.run.loop import train
from kenotron_train.run.recovery import _written

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")
NAN = float("nan")
SIX = range(1, 7)
LAYOUTS = [{"dp": 2}, {"pp": 2, "tp": 2}]
POISONED = {str(LAYOUTS[0]): 1, str(LAYOUTS[1]): 2}
"""A rank that computes a loss, not the one that speaks."""


def configure(
    folder: Path, policy: str, sizes: dict[str, int], resume: Path | None = None
) -> Config:
    changes: dict = {f"parallelism__{axis}": size for axis, size in sizes.items()}
    if resume is not None:
        changes["checkpoints__resume_checkpoint_path"] = resume
    flags = runs.arguments(folder, optimizer__nonfinite=policy, **changes)
    return load_config(DEFAULT_CONFIG, flags[1::2])


def poisoned(mesh: Mesh, config: Config, rank: int, where: str) -> list[StepResult]:
    """Train with a loss, or a gradient and loss, that is nan on one rank in steps 2 and 3."""
    right_gradient, right_loss = room.gradient, NextToken.loss
    now = 0

    def gradient(training, batch, step, *more):
        nonlocal now
        now = step
        return right_gradient(training, batch, step, *more)

    def loss(self, model, share, count):
        whole = right_loss(self, model, share, count)
        if mesh.rank != rank or now not in (2, 3):
            return whole
        if where == "loss":
            return lambda logits, m: Parts(whole(logits, m).total + NAN)
        return lambda logits, m: Parts(whole(logits, m).total * NAN)

    with (
        mock.patch.object(room, "gradient", gradient),
        mock.patch.object(NextToken, "loss", loss),
    ):
        return train(mesh, config)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_a_skipped_step_is_left_out_on_all_ranks(tmp_path: Path, sizes: dict, where: str) -> None:
    config = configure(tmp_path, "skip", sizes)
    ranks = spawn(poisoned, config, POISONED[str(sizes)], where, **sizes, preload=PRELOAD)
    for results in ranks:
        assert [r.skipped for r in results] == [n in (2, 3) for n in range(1, 7)]
        assert [str(r.nonfinite) for r in results] == [str(r.nonfinite) for r in ranks[0]]
        assert (results[1].nonfinite.name is None) == (where == "loss")
        assert math.isnan(results[1].loss)
    steps = runs.metrics(tmp_path)
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5, 6]
    assert [m.get("skipped") for m in steps] == [None, True, True, None, None, None]
    assert steps[1]["lm_loss"] is None and "NaN" not in json.dumps(steps)
    assert [m["consumed_tokens"] for m in steps] == [config.global_batch_tokens * n for n in SIX]
    schedule = LRSchedule.from_config(config.optimizer.learning_rate_scheduler, 6)
    assert [m["lr"] for m in steps] == [learning_rate(n, schedule) for n in SIX]
    state = json.loads((tmp_path / "checkpoints/6/manifest.json").read_text())["state"]
    assert (state["step"], state["optimizer_steps"]) == (6, 4)
    assert state["consumed_train_samples"] == 6 * config.global_batch_size


def test_a_run_resumes_after_skipped_steps_as_if_never_stopped(tmp_path: Path) -> None:
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    config = configure(tmp_path / "whole", "skip", {"dp": 2})
    want = spawn(poisoned, config, 0, "gradient", dp=2, preload=PRELOAD)[0]
    saved = tmp_path / "whole/checkpoints/3"  # after one update and two skipped steps
    again = configure(tmp_path / "resumed", "error", {"dp": 2}, saved)
    got = spawn(train, again, dp=2, preload=PRELOAD)[0]
    assert got == want[3:]


def test_the_line_of_a_step_says_that_it_was_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned(Mesh.connect(), configure(tmp_path, "skip", {}), 0, "loss")
    said = capsys.readouterr().out
    assert "WARNING|DP=0|PP=0|TP=0]: step 2: skipped: the loss is nan, though every" in said
    assert [line.endswith("update: skipped") for line in said.splitlines() if "lr: " in line] == [
        False, True, True, False, False, False,
    ]  # fmt: skip


def test_continue_updates_with_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = poisoned(Mesh.connect(), configure(tmp_path, "continue", {}), 0, "loss")
    assert not any(r.skipped for r in results) and results[1].nonfinite is not None
    assert results[3].nonfinite is None  # the gradients of the other steps were finite
    assert "step 2: made all the same: the loss is nan" in capsys.readouterr().out
    assert runs.metrics(tmp_path)[1]["skipped"] is False


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_an_error_names_step_parameter_and_rank(tmp_path: Path, sizes: dict) -> None:
    config = configure(tmp_path, "error", sizes)
    words = "step 2: the gradient of '.*' holds nan on ranks? [0-9, ]*, and [0-9]+ more are not"
    with pytest.raises(RankError, match=words):
        spawn(poisoned, config, POISONED[str(sizes)], "gradient", **sizes, preload=PRELOAD)
    with pytest.raises(RankError, match="step 2: the loss is nan, though every gradient is finite"):
        spawn(poisoned, config, POISONED[str(sizes)], "loss", **sizes, preload=PRELOAD)


def masked(mesh: Mesh, config: Config, without: tuple[int, ...]) -> list[StepResult]:
    """Train; rows of the data ranks ``without`` have no target."""
    rows, ranks = config.global_batch_size, mesh["dp"].size

    def mask(samples: torch.Tensor, sequence: int) -> torch.Tensor:
        kept = torch.tensor([s % rows * ranks // rows not in without for s in samples.tolist()])
        return kept[:, None].expand(-1, sequence)

    return train(mesh, config, target_mask=mask)


def test_one_data_rank_without_targets_is_fine(tmp_path: Path) -> None:
    for name in ("one", "two", "half"):
        (tmp_path / name).mkdir()
    one, two = (configure(tmp_path / n, "error", {"dp": k}) for k, n in ((1, "one"), (2, "two")))
    one = replace(one, tokens=replace(one.tokens, micro_batch_size=4))  # the same global batch
    [want] = spawn(masked, one, (), preload=PRELOAD)
    full = spawn(masked, two, (), dp=2, preload=PRELOAD)[0]
    other = configure(tmp_path / "half", "error", {"dp": 2})
    half = spawn(masked, other, (1,), dp=2, preload=PRELOAD)
    assert half[0] == half[1]
    assert full[0].loss == pytest.approx(want[0].loss, rel=1e-6)
    assert all(r.nonfinite is None for r in half[0])
    assert half[0][0].loss != full[0].loss and half[0][-1].loss < half[0][0].loss


def test_a_batch_without_any_target_is_an_error_naming_the_step(tmp_path: Path) -> None:
    config = configure(tmp_path, "skip", {"dp": 2})  # no policy excuses it
    with pytest.raises(RankError, match="step 1: no position of the global batch has a target"):
        spawn(masked, config, (0, 1), dp=2, preload=PRELOAD)


def test_a_record_that_cannot_be_made_hides_no_cause(tmp_path: Path) -> None:
    stage = mock.Mock()
    stage.origins.side_effect = KeyError("row 7")
    data = _origins(stage, [3])
    assert data == [{"where": "unknown: KeyError: 'row 7'"}]
    blame = Blame(5, Cursor(), (), [3], data, "head", NonFinite(NAN, None, "nan", ()))
    (tmp_path / "file").write_text("in the way")
    path, trouble = _written(tmp_path / "file", blame)
    assert not path and "file" in trouble
    path, trouble = _written(tmp_path / "run", blame)
    assert json.loads(Path(path).read_text())["data"] == data and not trouble
