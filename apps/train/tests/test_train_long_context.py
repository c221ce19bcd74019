"""A longer context from a checkpoint: another rope_theta or YaRN, with the optimizer or without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from own_runs import configure, documents, jsonl, run, trace

from kenotron_data import Batch
from kenotron_dist import Mesh
from kenotron_engine import gradient
from kenotron_train.assemble import build_training
from kenotron_train.run.resume import resume

YARN = "{rope_type: yarn, factor: 4, original_max_position_embeddings: 32}"
LONGER = {
    "tokens.sequence_length": 128,
    "model.model_config.rope_theta": 50000,
    "model.model_config.rope_scaling": YARN,
    "tokens.train_steps": 6,
    "tokens.micro_batch_size": 1,
    "checkpoints.accept_changed_data": "true",
}
SAVED = {"checkpoints.checkpoint_interval": 4}
LAYOUTS = {
    "tp2": {"parallelism.tp": 2},
    "cp2": {"parallelism.cp": 2},
    "pp2, zero 3": {"parallelism.pp": 2, "optimizer.zero_stage": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and a short run of 4 steps on it."""
    path = tmp_path_factory.mktemp("short")
    jsonl(path / "a.jsonl", [{"text": text} for text in documents()])
    run(path / "1", corpus(path), SAVED)
    return path


def corpus(folder: Path) -> dict[str, str]:
    return {"hf_dataset_or_datasets": str(folder / "a.jsonl")}


def resumed(folder: Path, **more: object) -> dict[str, object]:
    given = {"checkpoints.resume_checkpoint_path": folder / "1/checkpoints/4"}
    return LONGER | given | {"checkpoints.accept_changed_rope": "true"} | more


def test_a_run_resumes_with_a_longer_context_on_every_layout(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(tmp_path / "1", corpus(folder), resumed(folder))
    one = trace(Mesh.connect(), config, str(tmp_path / "cache"))
    said = capsys.readouterr().out
    assert "rope_theta changes from 10000.0 to 50000.0; rope_scaling changes from None to" in said
    assert len(one) == 2 and one[0][0] < 5.6
    for name, layout in LAYOUTS.items():
        more = resumed(folder, **layout)
        many = run(tmp_path / name, corpus(folder), more)
        assert [loss for loss, _ in many] == pytest.approx([loss for loss, _ in one], rel=1e-5)


def test_weights_alone_begin_a_run_with_a_longer_context(folder: Path, tmp_path: Path) -> None:
    given = f"{{path: {folder / '1/checkpoints/4'}, accept_changed_rope: true}}"
    first = run(tmp_path / "1", corpus(folder), LONGER | {"model.init_method": given})
    kept = run(tmp_path / "2", corpus(folder), resumed(folder))
    drawn = run(tmp_path / "3", corpus(folder), LONGER)
    assert first[0][0] < drawn[0][0]
    assert kept[0][0] != first[0][0]  # other rows


def test_the_model_has_the_positions_of_the_config(folder: Path, tmp_path: Path) -> None:
    """The weights are the checkpoint's; only positions differ, and so does the loss."""
    losses = []
    for changes in (resumed(folder), resumed(folder) | {"model.model_config.rope_scaling": "null"}):
        config = configure(tmp_path / str(len(losses)), corpus(folder), changes)
        training = build_training(config, Mesh.connect())
        progress, _ = resume(training)
        assert progress.step == 4 and training.optimizer.steps == 4
        tokens = torch.arange(128).view(1, 1, -1) % 61
        batch = batch_of(tokens)
        losses.append(gradient(training, batch, 5).loss.item())
    assert losses[0] != losses[1]


def batch_of(tokens: torch.Tensor) -> Batch:
    positions = torch.arange(tokens.shape[-1]).expand_as(tokens)
    return Batch(tokens, tokens.roll(-1, -1), positions, torch.zeros(1, 1, dtype=torch.int64))


def test_a_changed_base_is_refused_with_the_key_that_accepts_it(
    folder: Path, tmp_path: Path
) -> None:
    changes = resumed(folder) | {"checkpoints.accept_changed_rope": "false"}
    config = configure(tmp_path / "1", corpus(folder), changes)
    with pytest.raises(ValueError, match="rope_theta is 50000.0 in the config and 10000.0") as hint:
        trace(Mesh.connect(), config, str(tmp_path / "cache"))
    assert "--set checkpoints.accept_changed_rope=true extends the context" in str(hint.value)
    method = f"{{path: {folder / '1/checkpoints/4'}}}"
    config = configure(tmp_path / "2", corpus(folder), LONGER | {"model.init_method": method})
    with pytest.raises(ValueError, match="rope_theta: 50000.0 and 10000.0") as hint:
        trace(Mesh.connect(), config, str(tmp_path / "cache"))
    assert "model.init_method.accept_changed_rope: true extends their context" in str(hint.value)
    wide = resumed(folder) | {"model.model_config.rms_norm_eps": 1e-3}
    config = configure(tmp_path / "3", corpus(folder), wide)
    with pytest.raises(ValueError, match="rms_norm_eps is 0.001 in the config"):
        trace(Mesh.connect(), config, str(tmp_path / "cache"))
