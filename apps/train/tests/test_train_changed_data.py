"""Other data under the same keys of a config: an error, which a key accepts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import runs

from kenotron_ckpt import read_manifest
from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_data import TokenWriter
from kenotron_dist import Mesh, spawn
from kenotron_train.config_file import load_config
from kenotron_train.run import loop

SECTION = "data_stages__0__data__dataset"


def configure(folder: Path, **changes: object) -> Config:
    changes = {"tokens__limit_val_batches": 0, "tokens__train_steps": 4} | changes
    return load_config(DEFAULT_CONFIG, runs.arguments(folder, **changes)[1::2])


def edited(text: Path, old: str, new: str) -> None:
    text.write_text(text.read_text().replace(old, new, 1))


def tokens(folder: Path, seed: int) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with TokenWriter(folder / "a.ds", token_bytes=2) as writer:
        writer.add([np.random.default_rng(seed).integers(0, 256, 8000)])
    return folder


def of_folder(folder: Path, data: Path, **changes: object) -> Config:
    section = json.dumps({"dataset_folder": str(data)})
    values = [f"data_stages.0.data.dataset={section}"]
    changes = {"tokens__limit_val_batches": 0, "tokens__train_steps": 4} | changes
    named = f"{SECTION.replace('__', '.')}.hf_dataset_or_datasets"
    own = [each for each in runs.arguments(folder, **changes)[1::2] if not each.startswith(named)]
    return load_config(DEFAULT_CONFIG, [*own, *values])


def train(mesh: Mesh, config: Config) -> list[float]:
    return [step.loss for step in loop.train(mesh, config)]


def test_one_changed_character_of_the_text_ends_a_resumed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh.connect()
    train(mesh, configure(tmp_path))
    more = {"tokens__train_steps": 6}
    config = configure(tmp_path, **more)
    edited(tmp_path / "corpus.txt", "line 700 of", "line 700 OF")
    with pytest.raises(
        ValueError,
        match=r"data_stages.0 \(Python sources\): the data are not th"
        r".*both have .* tokens are others.*accept_changed_data=true",
    ):
        train(mesh, config)
    capsys.readouterr()
    accepted = configure(tmp_path, **more, checkpoints__accept_changed_data=True)
    edited(tmp_path / "corpus.txt", "line 700 of", "line 700 OF")
    assert len(train(mesh, accepted)) == 2
    assert "WARNING" in (said := capsys.readouterr().out)
    assert "the data are not those that the checkpoint was trained with: both have" in said
    again = configure(tmp_path, tokens__train_steps=8)
    edited(tmp_path / "corpus.txt", "line 700 of", "line 700 OF")
    assert len(train(mesh, again)) == 2  # the new data are those of the checkpoint now


def test_a_moved_folder_is_the_same_data_and_a_replaced_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tokens(tmp_path / "data", 1)
    train(Mesh.connect(), of_folder(tmp_path, data))
    shutil.move(data, tmp_path / "moved")
    (tmp_path / "data").symlink_to(tmp_path / "moved")
    assert len(train(Mesh.connect(), of_folder(tmp_path, data, tokens__train_steps=6))) == 2
    (tmp_path / "data").unlink()
    tokens(data, 2)
    with pytest.raises(ValueError, match="the data are not those"):
        train(Mesh.connect(), of_folder(tmp_path, data, tokens__train_steps=8))
    # Another folder is another key: the log says so, as before.
    capsys.readouterr()
    other = of_folder(tmp_path, tokens(tmp_path / "other", 3), tokens__train_steps=8)
    assert len(train(Mesh.connect(), other)) == 2
    assert "data_stages changes from" in capsys.readouterr().out


def test_any_layout_finds_the_change(tmp_path: Path) -> None:
    data = tokens(tmp_path / "data", 1)
    layout = {"parallelism__dp": 2, "tokens__micro_batch_size": 1}
    config = of_folder(tmp_path, data, **layout)
    assert len(spawn(train, config, dp=2, preload=["kenotron_train.run.loop"])[0]) == 4
    assert len(train(Mesh.connect(), of_folder(tmp_path, data, tokens__train_steps=6))) == 2
    tokens(data, 2)
    longer = of_folder(tmp_path, data, tokens__train_steps=8, **layout)
    with pytest.raises(RuntimeError, match="the data are not those"):
        spawn(train, longer, dp=2, preload=["kenotron_train.run.loop"])


def test_the_checkpoint_has_the_numbers_and_one_without_them_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tokens(tmp_path / "data", 1)
    with monkeypatch.context() as patch:
        real = loop.Progress.to_state
        patch.setattr(
            loop.Progress,
            "to_state",
            lambda self: {k: v for k, v in real(self).items() if k != "data"},
        )
        train(Mesh.connect(), of_folder(tmp_path, data))
    run = tmp_path / "checkpoints"
    assert "data" not in read_manifest(run).state
    tokens(data, 2)
    train(Mesh.connect(), of_folder(tmp_path, data, tokens__train_steps=6))
    found = read_manifest(run).state["data"]
    assert found["0"]["samples"] == 8000 // 33 and found["0"]["tokens"] == 8000


def test_the_stage_that_is_read_later_is_compared_with_the_one_before(tmp_path: Path) -> None:
    """A stage is known from its first step on; another stage's data may change before that."""
    first, second = tokens(tmp_path / "first", 1), tokens(tmp_path / "second", 2)
    stages = json.dumps(
        [
            {
                "name": name,
                "start_training_step": start,
                "data": {"seed": 1, "dataset": {"dataset_folder": str(folder)}},
            }
            for name, start, folder in (("one", 1, first), ("two", 4, second))
        ]
    )

    def config(steps: int) -> Config:
        flags = runs.arguments(tmp_path, tokens__limit_val_batches=0, tokens__train_steps=steps)
        own = [each for each in flags[1::2] if not each.startswith("data_stages")]
        return load_config(DEFAULT_CONFIG, [*own, f"data_stages={stages}"])

    train(Mesh.connect(), config(3))
    tokens(second, 3)
    train(Mesh.connect(), config(5))
    assert sorted(read_manifest(tmp_path / "checkpoints").state["data"]) == ["0", "1"]
    tokens(second, 4)
    with pytest.raises(ValueError, match=r"data_stages.1 \(two\): the data are not those"):
        train(Mesh.connect(), config(7))
