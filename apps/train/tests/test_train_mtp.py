"""Multi-token prediction in a run: the log, a resume, evaluation, and the export without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
from own_runs import documents, jsonl, run

from kenotron_convert.cli import main

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
    run(tmp_path / "plain", dataset, MTP | {"model.mtp": "null"})
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
