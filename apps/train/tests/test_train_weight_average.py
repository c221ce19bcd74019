"""Averages of weights: while training, in checkpoints, and over several checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from own_runs import configure, documents, jsonl, run, trace

from kenotron_ckpt import open_checkpoint, read_box
from kenotron_convert.cli import main
from kenotron_dist import Mesh
from kenotron_optim import WeightAverages
from kenotron_train.run.preview import preview

EMA = {
    "optimizer.weight_average": "{decay: 0.5}",
    "checkpoints.checkpoint_interval": 2,
    "tokens.limit_val_batches": 1,
}
DP2 = {"parallelism.dp": 2, "tokens.micro_batch_size": 1, "optimizer.zero_stage": 3}


@pytest.fixture
def dataset(tmp_path: Path) -> dict[str, str]:
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents()])
    return {"hf_dataset_or_datasets": str(path)}


def tensors(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Weights of a checkpoint, or what stands under a prefix."""
    opened = open_checkpoint(folder, Mesh.connect())
    return {
        name.removeprefix(prefix): read_box(
            opened.folder, record, (0,) * len(record.shape), record.shape
        )
        for name, record in opened.manifest.records.items()
        if (name.startswith(prefix) if prefix else not name.startswith("optimizer."))
    }


def test_averages_are_saved_and_resumed_on_another_layout(tmp_path: Path, dataset: dict) -> None:
    one = run(tmp_path / "1", dataset, EMA)
    plain = run(tmp_path / "plain", dataset, EMA | {"optimizer.weight_average": "null"})
    assert plain == one  # averaging changes no training
    last = runs.metrics(tmp_path / "1")[-1]
    assert last["validation_loss_averaged"] > last["validation_loss"]
    resumed = {"checkpoints.resume_checkpoint_path": tmp_path / "1/checkpoints/2"}
    first = run(tmp_path / "first", dataset, EMA | {"checkpoints.checkpoint_interval": 1})
    assert first == one
    begun = tmp_path / "first/checkpoints/1"  # the average begins with the first update
    weights, average = tensors(begun), tensors(begun, "optimizer.average.")
    assert all(torch.equal(x, average[name]) for name, x in weights.items())
    assert run(tmp_path / "2", dataset, EMA | resumed) == one[2:]
    assert (
        runs.metrics(tmp_path / "2")[-1]["validation_loss_averaged"]
        == (last["validation_loss_averaged"])
    )
    run(tmp_path / "3", dataset, EMA | DP2 | resumed)
    other = runs.metrics(tmp_path / "3")[-1]["validation_loss_averaged"]
    assert other == pytest.approx(last["validation_loss_averaged"], rel=1e-5)


def test_a_run_that_resumes_before_the_first_average_begins_with_the_same_update(
    tmp_path: Path, dataset: dict
) -> None:
    rare = EMA | {"optimizer.weight_average": "{decay: 0.5, every: 3}"}
    one = run(tmp_path / "1", dataset, rare)
    assert tensors(tmp_path / "1/checkpoints/2", "optimizer.average.") == {}
    resumed = {"checkpoints.resume_checkpoint_path": tmp_path / "1/checkpoints/2"}
    assert run(tmp_path / "2", dataset, rare | resumed) == one[2:]
    first, second = (runs.metrics(tmp_path / each)[-1] for each in "12")
    assert first["validation_loss_averaged"] == second["validation_loss_averaged"]


def test_a_checkpoint_without_averages_begins_them(
    tmp_path: Path, dataset: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "1", dataset, EMA | {"optimizer.weight_average": "null"})
    resumed = {
        "checkpoints.resume_checkpoint_path": tmp_path / "1/checkpoints/2",
        "logging.log_level": "info",
    }
    config = configure(tmp_path / "2", dataset, EMA | resumed)
    trace(Mesh.connect(), config, str(tmp_path / "cache"))
    assert "optimizer.weight_average begins with the next update" in capsys.readouterr().out
    assert runs.metrics(tmp_path / "2")[-1]["validation_loss_averaged"] > 0
    weights, average = (
        tensors(tmp_path / "2/checkpoints/4", prefix) for prefix in ("", "optimizer.average.")
    )
    assert weights.keys() == average.keys()
    assert not all(torch.equal(weights[name], average[name]) for name in weights)


def test_the_command_averages_checkpoints_and_takes_out_moving_averages(
    tmp_path: Path, dataset: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "1", dataset, EMA)
    two, four = (tmp_path / "1/checkpoints" / step for step in ("2", "4"))
    config = configure(tmp_path / "again", dataset, EMA | {
        "checkpoints.resume_checkpoint_path": two
    })  # fmt: skip
    trace(Mesh.connect(), config, str(tmp_path / "cache"))
    assert "left behind" not in capsys.readouterr().out
    out = tmp_path / "mean"
    assert main(["average", "--ckpt", str(two), str(four), "--out", str(out)]) == 0
    assert f"wrote {out / '0'}" in capsys.readouterr().out
    a, b, mean = tensors(two), tensors(four), tensors(out)
    assert all(torch.equal(mean[n], ((a[n].double() + b[n]) / 2).to(a[n].dtype)) for n in a)
    assert mean.keys() == a.keys()
    moving = tmp_path / "moving"
    assert main(["average", "--ckpt", str(four), "--ema", "--out", str(moving)]) == 0
    wanted = tensors(four, "optimizer.average.")
    assert all(torch.equal(x, wanted[n].to(x.dtype)) for n, x in tensors(moving).items())
    hf = ["kenotron-to-hf", "--ckpt", str(moving), "--out", str(tmp_path / "hf")]
    assert main(hf) == 0
    start = {"model.init_method": f"{{path: {moving}}}", "tokens.train_steps": 1}
    fresh = run(tmp_path / "next", dataset, start)
    assert fresh[0][0] < run(tmp_path / "drawn", dataset, {"tokens.train_steps": 1})[0][0]


def test_what_cannot_be_averaged_is_named(
    tmp_path: Path, dataset: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    two = {"checkpoints.checkpoint_interval": 2, "tokens.train_steps": 2}
    run(tmp_path / "1", dataset, two)
    wide = {"model.model_config.hidden_size": 16, "model.model_config.num_attention_heads": 2}
    run(tmp_path / "2", dataset, two | wide | {"model.model_config.num_key_value_heads": 2})
    paths = [str(tmp_path / each / "checkpoints/2") for each in "12"]

    def said(*given: str) -> str:
        assert main(["average", "--out", str(tmp_path / "out"), *given]) == 1
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "has no moving average of its weights" in said("--ckpt", paths[0], "--ema")
    assert "one checkpoint was given, and the mean of one is itself" in said("--ckpt", paths[0])
    assert "was given twice" in said("--ckpt", paths[0], paths[0])
    run(tmp_path / "3", dataset, two | {"model.model_config.rope_theta": 5e5})
    theirs = str(tmp_path / "3/checkpoints/2")
    said_of_theta = said("--ckpt", paths[0], theirs)
    assert "is of another model than" in said_of_theta and "rope.theta" in said_of_theta
    assert "is of another model than" in said("--ckpt", *paths)
    assert "nowhere" in said("--ckpt", paths[0], str(tmp_path / "nowhere"))
    text = preview(configure(tmp_path, dataset, EMA))
    assert "weight averages" in text


def test_an_evaluation_while_a_checkpoint_is_copied_leaves_the_averages_alone(
    tmp_path: Path, dataset: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are exchanged with the weights in validations alone, before a checkpoint begins."""
    swaps, swapped = [], WeightAverages.in_place

    def counted(self: WeightAverages) -> Any:
        swaps.append(1)
        return swapped(self)

    monkeypatch.setattr(WeightAverages, "in_place", counted)
    more = EMA | {"evaluate": "{interval: 1, perplexity: true}", "tokens.val_check_interval": 3}
    trace(Mesh.connect(), configure(tmp_path / "1", dataset, more), str(tmp_path / "cache"))
    steps = runs.metrics(tmp_path / "1")
    assert sum("evaluation" in str(step) for step in steps) == 4
    assert len(swaps) == sum("validation_loss" in step for step in steps) == 2
