"""Trackers: what they were told is read back from their files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import runs
from test_train_rollback import poison

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh
from kenotron_train.assemble import log_plan
from kenotron_train.config_file import load_config
from kenotron_train.log import trackers
from kenotron_train.log.trackers import Trackers, check_trackers, chosen_trackers, flat
from kenotron_train.run.loop import train


@pytest.fixture(autouse=True)
def no_wandb_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in trackers.WANDB_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def config_of(folder: Path, **changes: object) -> Config:
    return load_config(DEFAULT_CONFIG, runs.arguments(folder, **changes)[1::2])


def resumed(folder: Path, **changes: object) -> Config:
    changes["checkpoints__resume_checkpoint_path"] = folder / "checkpoints/3"
    return config_of(folder, **changes)


def wandb_records(path: Path) -> Iterator:
    """Records of an offline run: a LevelDB log of protocol buffers, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_tensorboard_has_every_figure_and_steps_done_again_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    section = {"logging__trackers": "[tensorboard]"}
    train(Mesh.connect(), config_of(tmp_path, **section))
    train(Mesh.connect(), resumed(tmp_path, **section))
    events = EventAccumulator(str(tmp_path / "checkpoints/tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("lm_loss")]
    steps = runs.metrics(tmp_path)
    assert found == [(s["step"], pytest.approx(s["lm_loss"], rel=1e-6)) for s in steps]
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    tags = set(events.Tags()["scalars"])
    assert {"lr", "tokens_per_sec", "validation_loss", "memory_gb", "step_time_s"} <= tags
    assert "step" not in tags


def test_wandb_offline_has_config_and_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "its-project")
    train(Mesh.connect(), config_of(tmp_path))
    (path,) = (tmp_path / "checkpoints/wandb").glob("offline-run-*/run-*.wandb")
    records = list(wandb_records(path))
    (run,) = [record.run for record in records if record.HasField("run")][:1]
    assert (run.project, run.display_name) == ("its-project", "default")
    identity = json.loads((tmp_path / "checkpoints/wandb_run.json").read_text())
    assert identity == {"id": run.run_id, "ahead": 0, "attempt": 1}
    (saved,) = [each for each in run.config.update if each.key == "nanotron_config"]
    assert json.loads(saved.value_json)["tokens"]["train_steps"] == 6
    history = [record.history for record in records if record.HasField("history")]
    items = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in h.item} for h in history
    ]
    steps = runs.metrics(tmp_path)
    assert [i["_step"] for i in items] == [1, 2, 3, 4, 5, 6]
    for name in ("lm_loss", "lr", "consumed_tokens"):
        assert [i[name] for i in items] == [s[name] for s in steps]
    assert items[-1]["validation_loss"] == steps[-1]["validation_loss"]


def test_a_resumed_training_goes_on_in_its_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(Mesh.connect(), config_of(tmp_path))
    train(Mesh.connect(), resumed(tmp_path))
    files = list((tmp_path / "checkpoints/wandb").glob("offline-run-*/run-*.wandb"))
    steps = {
        tuple(r.history.step.num for r in wandb_records(path) if r.HasField("history"))
        for path in files
    }
    (identity,) = {r.run.run_id for f in files for r in wandb_records(f) if r.HasField("run")}
    saved = json.loads((tmp_path / "checkpoints/wandb_run.json").read_text())
    assert saved["id"] == identity
    assert steps == {(1, 2, 3, 4, 5, 6), (4, 5, 6)}


def test_trackers_after_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    changes = {"logging__trackers": "[tensorboard, wandb]", "optimizer__nonfinite": "rollback"}
    with poison(17):
        train(Mesh.connect(), config_of(tmp_path, **changes))
    steps = runs.metrics(tmp_path)
    events = EventAccumulator(str(tmp_path / "checkpoints/tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("lm_loss")]
    assert shown == [(s["step"], pytest.approx(s["lm_loss"], rel=1e-6)) for s in steps]
    (path,) = (tmp_path / "checkpoints/wandb").glob("offline-run-*/run-*.wandb")
    records = list(wandb_records(path))
    items = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    places = [(i["_step"], i["step"], i["attempt"]) for i in items]
    first, second = [(n, n, 1) for n in range(1, 5)], [(n + 1, n, 2) for n in (4, 5, 6)]
    assert places == first + second
    kept = [i["lm_loss"] for i in items if i["attempt"] == 2 or i["step"] < 4]
    assert kept == [s["lm_loss"] for s in steps]
    axes = {r.metric.glob_name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["*"] == "step"
    assert "wandb keeps the steps after 3 as attempt 1" in capsys.readouterr().out
    train(Mesh.connect(), config_of(tmp_path, **changes, tokens__train_steps=7))
    (later,) = set((tmp_path / "checkpoints/wandb").glob("offline-run-*/run-*.wandb")) - {path}
    assert [r.history.step.num for r in wandb_records(later) if r.HasField("history")] == [8]


@pytest.mark.parametrize(
    ("given", "environ", "chosen"),
    [
        ("null", {}, ()),
        ("null", {"WANDB_API_KEY": "k"}, ("wandb",)),
        ("null", {"WANDB_MODE": "offline"}, ("wandb",)),
        ("null", {"WANDB_MODE": "disabled", "WANDB_PROJECT": "p"}, ()),
        ("[]", {"WANDB_PROJECT": "p"}, ()),
        ("[wandb, tensorboard]", {"WANDB_MODE": "disabled"}, ("tensorboard",)),
        ("[tensorboard, wandb]", {}, ("tensorboard", "wandb")),
    ],
)
def test_config_or_environment_choose(
    given: str, environ: dict, chosen: tuple, tmp_path: Path
) -> None:
    names = config_of(tmp_path, logging__trackers=given).logging.trackers
    assert chosen_trackers(names, environ) == chosen


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            "[wandb]",
            r"logging.trackers asks for wandb, .* '\./apps/train\[wandb\]' in the repo.*, or take",
        ),
        ("null", r"the environment \(WANDB_\*\) asks for wandb, .* or set WANDB_MODE=disabled"),
    ],
)
def test_what_is_not_installed_is_said_before_the_training(
    given: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "PACKAGES", {"wandb": "no_such_package"})
    monkeypatch.setenv("WANDB_PROJECT", "p")
    with pytest.raises(ValueError, match=sentence):
        check_trackers(config_of(tmp_path, logging__trackers=given).logging.trackers)
    with pytest.raises(ValueError, match=sentence):
        train(Mesh.connect(), config_of(tmp_path, logging__trackers=given))
    assert not (tmp_path / "checkpoints").exists()


def test_a_tracker_that_fails_is_left_behind_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    class Failing:
        def log(self, step: int, scalars: dict) -> None:
            told.append(step)
            raise OSError("disk full")

        def close(self) -> None:
            raise AssertionError("it was left behind")

    monkeypatch.setitem(trackers.MAKERS, "tensorboard", lambda *_: Failing())
    said = []
    all_of_them = Trackers(
        log_plan(config_of(tmp_path, logging__trackers="[tensorboard]")), 1, said.append
    )
    all_of_them.log(1, {"a": 1.0})
    all_of_them.log(2, {"a": 1.0})
    all_of_them.close()
    assert told == [1]
    (line,) = said
    assert line == ("tensorboard gets no more figures: OSError: disk full; metrics.jsonl has all")


def test_figures_are_flat_numbers() -> None:
    metrics = {
        "step": 3,
        "lm_loss": None,
        "lr": 1,
        "nonfinite": "text",
        "layers": {"layer_0/mlp/mean": 0.5},
        "validation_sources": {"books": {"loss": 2.0}},
    }
    assert flat(metrics) == {
        "lr": 1.0,
        "layer_0/mlp/mean": 0.5,
        "validation_sources/books/loss": 2.0,
    }
