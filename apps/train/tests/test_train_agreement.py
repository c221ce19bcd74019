"""A resume compares what folder, checkpoint and config say, and starts over nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
from test_train_unreadable import configure, contents
from xxhash import xxh3_64_hexdigest

from kenotron_config import Config
from kenotron_dist import Mesh
from kenotron_models import AnyConfig
from kenotron_models.families import LlamaConfig, MistralConfig, Qwen2Config
from kenotron_train.failures.last_failure import noted
from kenotron_train.run import loop
from kenotron_train.run.same_model import check_model, model_of


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("finished")
    loop.train(Mesh.connect(), configure(folder, checkpoints__checkpoint_interval=3))
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def no_manifests(run: Path) -> None:
    for path in run.glob("*/manifest.json"):
        path.unlink()


def no_steps(run: Path) -> None:
    for step in ("3", "6"):
        shutil.rmtree(run / step)


def no_latest_manifest(run: Path) -> None:
    (run / "6/manifest.json").unlink()


def link_to_nothing(run: Path) -> None:
    no_manifests(run)
    (run / "6/manifest.json").symlink_to(run / "gone")


def metrics_alone(run: Path) -> None:
    no_steps(run)
    (run / "latest.txt").unlink()


def first_step_alone(run: Path) -> None:
    metrics_alone(run)
    (run / "3").mkdir()
    (run / "3/shard-00000.safetensors").write_bytes(b"cut off")


def no_metrics_yet(run: Path) -> None:
    first_step_alone(run)
    (run / "metrics.jsonl").unlink()


CUT_OFF: dict[Callable[[Path], None], str] = {
    no_manifests: "latest.txt names step 6, whose folder has shards and no manifest.json",
    no_steps: "latest.txt names step 6, but no step folder here has a manifest.json",
    no_latest_manifest: "latest.txt names step 6, whose folder has shards and no manifest.json",
    link_to_nothing: "6: manifest.json is a link to nothing",
    metrics_alone: "metrics.jsonl ends with step 6 and there is no checkpoint, though checkpoints.",
    first_step_alone: "step 3 has shards and no manifest.json, but metrics.jsonl ends with step 6",
    no_metrics_yet: "step 3 has shards and no manifest.json, but metrics.jsonl has no step",
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("cut", CUT_OFF, ids=lambda cut: cut.__name__)
def test_a_copy_that_was_cut_off_is_not_trained_over(
    copy: Path, cut: Callable[[Path], None], given: bool
) -> None:
    run = copy / "checkpoints"
    cut(run)
    before = contents(run)
    named = {"checkpoints__resume_checkpoint_path": run} if given else {}
    config = configure(copy, checkpoints__checkpoint_interval=3, **named)
    with pytest.raises(ValueError, match=r"(?s)checkpoints.checkpoints_path: .*new checkp") as told:
        loop.train(Mesh.connect(), config)
    assert CUT_OFF[cut] in str(told.value)
    assert contents(run) == before


def test_a_run_that_was_killed_in_its_first_save_starts_afresh(copy: Path) -> None:
    run = copy / "checkpoints"
    first_step_alone(run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    config = configure(copy, checkpoints__checkpoint_interval=3)
    assert len(loop.train(Mesh.connect(), config)) == 6


def test_keys_without_effect_are_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = {"checkpoints__load_optimizer": False, "checkpoints__load_lr_scheduler": False}
    more = {"tokens__train_steps": 7, "checkpoints__checkpoint_interval": 3}
    run = copy / "checkpoints"
    loop.train(Mesh.connect(), configure(copy, **more, **alone))
    said = capsys.readouterr().out
    assert (
        "checkpoints.load_optimizer: false and checkpoints.load_lr_scheduler: false had no effect"
        in said
    )
    assert f"add checkpoints.resume_checkpoint_path: {run} to this start alone" in said
    loop.train(
        Mesh.connect(), configure(copy, **more, **alone, checkpoints__resume_checkpoint_path=run)
    )
    assert "had no effect" not in capsys.readouterr().out
    state = json.loads((run / "7/manifest.json").read_text())["state"]
    assert state["optimizer_steps"] == 7 and state["schedule_start"] == 0


def forge(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of step 6, and seal it again."""
    path = run / "6/manifest.json"
    data = json.loads(path.read_text())
    change(data)
    del data["checksum"]
    body = json.dumps(data)[:-1]
    path.write_text(f'{body},\n"checksum": "{xxh3_64_hexdigest(body.encode())}"\n}}\n')


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "step": (
        lambda data: data["state"].update(step=-4),
        r"state.step is -4, but the manifest is of step 6: it was edited",
    ),
    "counts": (
        lambda data: data["state"].update(consumed_tokens=-1),
        r"state.consumed_tokens is -1, no whole number from 0",
    ),
    "cursor": (
        lambda data: data["state"]["cursor"].update(consumed=1.5),
        r"state.cursor.consumed is 1.5, no whole number from 0",
    ),
    "no cursor": (
        lambda data: data["state"].update(cursor=3),
        r"state.cursor.cursor is None, no whole number from 0",
    ),
    "model": (
        lambda data: data["state"].update(model_config=3),
        r"its model_config is 3, no mapping",
    ),
    "family": (
        lambda data: data["state"]["model_config"].update(is_llama_config=None, is_moon_config=1),
        r"cannot be resumed: its model_config: ",
    ),
    "dtype": (
        lambda data: data["records"]["embedding.weight"].update(dtype="int32"),
        r"embedding.weight: the record is of int32, the model of float32",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_state_is_refused(copy: Path, case: str) -> None:
    change, message = FORGED[case]
    forge(copy / "checkpoints", change)
    config = configure(copy, checkpoints__checkpoint_interval=3, tokens__train_steps=7)
    with pytest.raises(ValueError, match=message):
        loop.train(Mesh.connect(), config)


SIZES: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
OTHERS: dict[str, tuple[AnyConfig, AnyConfig, str]] = {
    "a window": (
        LlamaConfig(**SIZES, rope_theta=10000.0),
        MistralConfig(**SIZES, sliding_window_size=16, rope_theta=10000.0),
        r"sliding_window_size .* is 16 in the config and null in the checkpoint",
    ),
    "layers without rope": (
        Qwen2Config(**SIZES),
        Qwen2Config(**SIZES, no_rope_layer=2),
        r"no_rope_layer is 2 in the config and None in the checkpoint",
    ),
    "the same, of an older release": (
        Qwen2Config(**SIZES),
        Qwen2Config(**SIZES, no_rope_layer=2),
        r"keys that the checkpoint does not have: no_rope_layer: 2",
    ),
}


def refusal(saved: dict[str, Any], config: Config, folder: Path) -> str:
    try:
        rope = config.checkpoints.accept_changed_rope
        check_model(saved, config.model, folder, accepts_rope=rope)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", OTHERS)
def test_another_model_is_refused_whatever_keys_say_so(finished: Path, case: str) -> None:
    before, now, message = OTHERS[case]
    config = configure(finished)
    then, config = (
        replace(config, model=replace(config.model, model_config=each)) for each in (before, now)
    )
    saved = model_of(then.model)
    check_model(saved, then.model, finished, accepts_rope=False)
    if "older" in case:
        saved = {key: value for key, value in saved.items() if key != "no_rope_layer"}
    said = refusal(saved, config, finished)
    assert re.search(rf"is of another model: model.model_config.*{message}", said)


def test_a_run_that_was_refused_leaves_no_failure_in_the_folder_of_another(finished: Path) -> None:
    run = finished / "checkpoints"
    cause = f"{run} is being written by another run (process 1 on x): give each run a folder"
    assert noted(run, cause, before=None) == ""
    assert not (run / "failure.json").exists()
    assert noted(run, "another cause", before=None) == ""
    assert (run / "failure.json").exists()


def test_the_program_says_so(copy: Path) -> None:
    no_steps(copy / "checkpoints")
    done = runs.train(copy, *runs.arguments(copy))
    assert done.returncode != 0
    assert "latest.txt names step 6, but no step folder here has a manifest.json" in done.stderr
