"""Multi-token prediction in a run: the log, a resume, evaluation, and the export without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from own_runs import configure, documents, jsonl, run, trace

from kenotron_convert.cli import main
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.recomputed import recomputed
from kenotron_cost.stage_sizes import stage_sizes
from kenotron_dist import Mesh, RankError

MTP = {
    "model.mtp": "{weight: 0.3}",
    "checkpoints.checkpoint_interval": 2,
    "tokens.limit_val_batches": 1,
}


def test_a_run_resumes_with_its_module_and_is_exported_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents()])
    dataset = {"hf_dataset_or_datasets": str(path)}
    one = run(tmp_path / "1", dataset, MTP)
    logged = [metrics["mtp_loss"] for metrics in runs.metrics(tmp_path / "1")]
    assert len(logged) == len(one) == 4 and logged[-1] < logged[0]
    resumed = {"checkpoints.resume_checkpoint_path": tmp_path / "1/checkpoints/2"}
    assert run(tmp_path / "2", dataset, MTP | resumed) == one[2:]
    assert [metrics["mtp_loss"] for metrics in runs.metrics(tmp_path / "2")] == logged[2:]
    plain = {"model.mtp": "null", "logging.log_level": "info"}
    config = configure(tmp_path / "without", dataset, MTP | resumed | plain)
    trace(Mesh.connect(), config, str(tmp_path / "cache"))
    assert "; the module of model.mtp is left behind" in capsys.readouterr().out
    run(tmp_path / "plain", dataset, MTP | plain)
    resumed = {"checkpoints.resume_checkpoint_path": tmp_path / "plain/checkpoints/2"}
    with pytest.raises(RankError, match=r"/2 has no module of model.mtp, which was given: its ru"):
        run(tmp_path / "3", dataset, MTP | resumed)
    assert "mtp_loss" not in runs.metrics(tmp_path / "plain")[-1]
    command = [
        "kenotron-to-hf",
        "--ckpt",
        str(tmp_path / "1/checkpoints"),
        "--out",
        str(tmp_path / "hf"),
    ]
    assert main(command) == 0
    said = capsys.readouterr()
    assert "config.json does not have: model.mtp: 9 tensors\n" in said.err
    assert "its logits are ours to" in said.out


def test_its_block_is_in_the_memory_of_activations(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents()])
    dataset = {"hf_dataset_or_datasets": str(path)}
    config = configure(tmp_path / "1", dataset, MTP | {"parallelism.recompute": "selective"})
    measured = MeasuredModel(cost_plan(config))
    sizes = [
        measured.kept(cost_plan(config), measured.kinds[2], way) for way in ("none", "selective")
    ]
    assert recomputed(cost_plan(config)) == ("selective",) * 3
    assert stage_sizes(cost_plan(config))[0].bytes_of["activations"] == 3 * sizes[1]
    room = {"parallelism.recompute_memory_gb": (2 * sizes[0] + sizes[1]) / 1e9}
    assert recomputed(cost_plan(configure(tmp_path / "1", dataset, MTP | room))) == (
        "selective", "none", "none",
    )  # fmt: skip
    first = run(tmp_path / "1", dataset, MTP | {"tokens.train_steps": 1} | room)
    assert first == run(tmp_path / "2", dataset, MTP | {"tokens.train_steps": 1})
