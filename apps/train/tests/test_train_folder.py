"""A run's folder: one run writes there, what another left stays, and where a start begins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from kenotron_ckpt import FolderLock, SaveFailed, latest_step
from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh
from kenotron_engine import StepResult
from kenotron_train.assemble import TrainingRun
from kenotron_train.config_file import load_config
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.log import metrics_file
from kenotron_train.progress import Progress
from kenotron_train.run import loop, own_folder


def configure(folder: Path, **changes: object) -> Config:
    changes = {"tokens__limit_val_batches": 0} | changes
    return load_config(DEFAULT_CONFIG, runs.arguments(folder, **changes)[1::2])


def test_a_second_run_in_a_folder_touches_nothing_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    section = {"logging__trackers": "[tensorboard]"}
    lock = FolderLock(folder)
    metrics = folder / "metrics.jsonl"
    metrics.write_text('{"step": 1, "lm_loss": 2.0}\n')
    open_file = metrics.open("a")  # as the run that goes on has it
    with pytest.raises(ValueError, match="is being written by another run"):
        loop.train(Mesh.connect(), configure(tmp_path, **section))
    open_file.write('{"step": 2, "lm_loss": 1.0}\n')
    open_file.close()
    assert [step["step"] for step in runs.metrics(tmp_path)] == [1, 2]
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "writer.lock"]
    lock.release()


def test_a_journal_that_goes_on_drops_steps_done_again_and_cut_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": i, "lm_loss": i / 2}) for i in (1, 2, 3)]
    path.write_text("\n".join(lines) + '\n{"step": 4, "lm_')
    book = metrics_file.MetricsFile(tmp_path, 3)
    book.write({"step": 3, "lm_loss": 9.0})
    book.close()
    assert [(s["step"], s["lm_loss"]) for s in metrics_file.read_journal(path)] == [
        (1, 0.5), (2, 1.0), (3, 9.0),
    ]  # fmt: skip
    book = metrics_file.MetricsFile(tmp_path, 1)
    book.close()
    assert path.read_text() == "" and book.aside == tmp_path / "metrics.1.jsonl"
    assert [s["step"] for s in metrics_file.read_journal(book.aside)] == [1, 2, 3]


def test_metrics_of_a_run_without_checkpoints_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"tokens__train_steps": 2, "checkpoints__save_final_state": False}
    for number in range(3):
        loop.train(Mesh.connect(), configure(tmp_path, **short))
        said = capsys.readouterr().out
        assert (f"kept in {tmp_path}/checkpoints/metrics.{number}.jsonl" in said) == (number > 0)
    for name in ("metrics.jsonl", "metrics.1.jsonl", "metrics.2.jsonl"):
        lines = (tmp_path / "checkpoints" / name).read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_whoever_goes_back_does_so_once_and_a_restart_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh.connect()
    loop.train(mesh, configure(tmp_path))
    back = {"checkpoints__resume_checkpoint_path": tmp_path / "checkpoints/3"}
    config = configure(tmp_path, **back, checkpoints__load_optimizer=False)
    assert own_folder.going_on(config.checkpoints, config.s3_upload, mesh) == config.checkpoints
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29999")
    again = own_folder.going_on(config.checkpoints, config.s3_upload, mesh)
    folder = config.checkpoints.checkpoints_path
    assert again == replace(config.checkpoints, resume_checkpoint_path=folder, load_optimizer=True)


class Fails(LifeCycle):
    """Ends a run in its first step."""

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """Fail."""
        raise LookupError("the first step")


def test_a_run_that_is_set_back_leaves_later_steps_behind(tmp_path: Path) -> None:
    """A restart that was not told to go back does not resume from one of them."""
    mesh, back = Mesh.connect(), {"checkpoints__resume_checkpoint_path": tmp_path / "checkpoints/3"}
    loop.train(mesh, configure(tmp_path))
    assert latest_step(tmp_path / "checkpoints") == 6
    with pytest.raises(LookupError, match="the first step"):
        loop.run(mesh, configure(tmp_path, **back), hooks=(Fails(),))
    assert latest_step(tmp_path / "checkpoints") == 3


def test_a_folder_of_nanotron_is_not_written_to(tmp_path: Path) -> None:
    theirs = tmp_path / "checkpoints/6"
    theirs.mkdir(parents=True)
    (theirs / "checkpoint_metadata.json").write_text("{}")
    for given in ("null", tmp_path / "checkpoints", theirs):
        config = configure(tmp_path, checkpoints__resume_checkpoint_path=given)
        with pytest.raises(ValueError, match=r"checkpoints of Nanotron \(6\).*kenotron_nanotron"):
            loop.train(Mesh.connect(), config)
    away = configure(
        tmp_path,
        checkpoints__checkpoints_path=tmp_path / "ours",
        checkpoints__resume_checkpoint_path=theirs,
    )
    with pytest.raises(ValueError, match="it is a checkpoint of Nanotron: .*kenotron_nanotron"):
        loop.train(Mesh.connect(), away)
    assert [path.name for path in theirs.iterdir()] == ["checkpoint_metadata.json"]


def test_a_run_inside_the_folder_is_where_another_begins_once(tmp_path: Path) -> None:
    mesh, inside = Mesh.connect(), tmp_path / "checkpoints/pre"
    loop.train(mesh, configure(tmp_path, checkpoints__checkpoints_path=inside))
    more = {"tokens__train_steps": 9, "checkpoints__resume_checkpoint_path": inside}
    config = configure(tmp_path, **more)
    assert own_folder.going_on(config.checkpoints, config.s3_upload, mesh) == config.checkpoints
    loop.train(mesh, config)
    again = own_folder.going_on(config.checkpoints, config.s3_upload, mesh)
    assert again.resume_checkpoint_path == str(tmp_path / "checkpoints")


def test_one_model_under_two_names_goes_on(tmp_path: Path) -> None:
    sizes = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4"
    sizes += ", num_key_value_heads: 2, vocab_size: 257, max_position_embeddings: 128"
    sizes += ", rope_theta: 10000.0, rms_norm_eps: 1e-5, tie_word_embeddings: false"
    llama = f"{{is_llama_config: true, attention_bias: true, {sizes}}}"
    qwen2 = f"{{is_qwen2_config: true, attention_bias: true, {sizes}}}"

    def made(model: str, steps: int) -> list[dict]:
        changes = {"model__model_config": model, "tokens__train_steps": steps}
        base = runs.arguments(tmp_path, **changes)[1::2]
        flags = [flag for flag in base if not flag.startswith("model.model_config.")]
        loop.train(Mesh.connect(), load_config(DEFAULT_CONFIG, flags))
        return runs.metrics(tmp_path)

    made(llama, 3)
    assert [step["step"] for step in made(qwen2, 6)] == [1, 2, 3, 4, 5, 6]


class InTheWay(LifeCycle):
    """A file where a checkpoint shall be."""

    def __init__(self, step: int) -> None:
        self.step = step

    def pre_save_checkpoint(self, training, progress) -> None:
        if progress.step == self.step:
            (training.log.folder / str(self.step)).write_text("")


@pytest.mark.parametrize("engine", ["torch", "datastates"])
def test_a_run_without_its_last_checkpoint_has_failed(engine: str, tmp_path: Path) -> None:
    config = configure(tmp_path, checkpoints__checkpointing_engine=engine)
    with pytest.raises(SaveFailed, match="over, but without its last checkpoint: .*checkpoints/6"):
        loop.run(Mesh.connect(), config, hooks=(InTheWay(6),))
    (tmp_path / "other").mkdir()
    other = configure(tmp_path / "other", checkpoints__checkpointing_engine=engine)
    outcome = loop.run(Mesh.connect(), other, hooks=(InTheWay(3),))  # one of several: a line
    assert len(outcome.results) == 6
