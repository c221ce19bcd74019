"""A run with a parametrisation by widths: its table, its checkpoints, and what reads them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from runs import arguments, metrics, program, train
from transformers import AutoModelForCausalLM

from kenotron_ckpt import read_manifest, resolve_step
from kenotron_config import DEFAULT_CONFIG
from kenotron_convert.exporting import export_hf
from kenotron_models import model_to_json
from kenotron_nanotron import model_config
from kenotron_train.config_file import parse_config

BASE = "base: {hidden_size: 16, intermediate_size: 24, num_attention_heads: 4}"
MORE = "embedding_multiplier: 3, output_multiplier: 2, std: 0.2"


def method(more: str = MORE) -> str:
    return f"{{use_mup: true, {BASE}, {more}}}"


def flags(folder: Path, **changes: object) -> list[str]:
    return arguments(folder, model__init_method=method(), **changes)


@pytest.fixture(scope="module", params=[("float32", True), ("bfloat16", False)], ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three steps; its dtype, and whether the embedding is tied."""
    path = tmp_path_factory.mktemp("mup")
    dtype, tied = request.param
    more = {"tokens__train_steps": 3, "model__dtype": dtype}
    more["model__model_config__tie_word_embeddings"] = tied
    done = train(path, *flags(path, **more))
    assert done.returncode == 0, done.stderr
    assert metrics(path)[-1]["step"] == 3
    return path


def test_check_prints_every_factor(tmp_path: Path) -> None:
    done = train(tmp_path, "--check", *flags(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "embedding x 3, logits x 1, attention's scores x 0.707107" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    wanted = "layers.*.attention.qkv.weight hidden 32 -> 32 + 16 + 16 0.141421 0.5 2"
    assert wanted.split() in lines
    assert "Cannot be run" not in done.stdout


def test_an_export_is_the_same_model_without_multipliers(folder: Path, tmp_path: Path) -> None:
    done = export_hf(folder / "checkpoints", tmp_path / "hf")
    assert done.deviation is not None and done.deviation < 1e-5
    said = json.loads((tmp_path / "hf/config.json").read_text())
    assert said["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    state = read_manifest(resolve_step(folder / "checkpoints")).state["model_config"]
    assert state["multipliers"]["embedding"] == 3.0
    table = model.get_input_embeddings().weight.detach()
    assert float(table.std()) == pytest.approx(0.6, rel=0.1)  # three times as large as it began
    with torch.no_grad():
        assert model(torch.arange(8)[None]).logits.isfinite().all()


def test_generation_reads_the_multipliers(folder: Path, tmp_path: Path) -> None:
    export_hf(folder / "checkpoints", tmp_path / "hf", check=False)
    texts = []
    for source in (folder / "checkpoints", tmp_path / "hf"):
        done = program(
            "apps/generate", tmp_path, "--ckpt-path", str(source), "--prompt", "line 1",
            "--max-new-tokens", "8",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] and texts[0].splitlines()[-1] == texts[1].splitlines()[-1]


def test_a_run_does_not_go_on_with_other_multipliers(folder: Path) -> None:
    state = read_manifest(resolve_step(folder / "checkpoints")).state
    tied = state["model_config"]["tie_word_embeddings"]
    same = {"model__dtype": state["dtype"], "model__model_config__tie_word_embeddings": tied}
    other = method(MORE.replace("3", "4"))
    for given in (other, "{std: 0.2}"):
        more = arguments(folder, model__init_method=given, tokens__train_steps=4, **same)
        done = train(folder, *more)
        assert done.returncode != 0
        assert "is of another model: model.model_config.multipliers is " in done.stderr


def test_first_weights_with_multipliers_are_to_be_folded(folder: Path, tmp_path: Path) -> None:
    source = f"{{path: {folder}/checkpoints}}"
    done = train(tmp_path, *arguments(tmp_path, model__init_method=source))
    assert done.returncode != 0
    assert "the weights were trained with multipliers (use_mup), and are those of" in done.stderr
    export_hf(folder / "checkpoints", tmp_path / "hf", check=False)
    folded = arguments(
        tmp_path, model__init_method=f"{{path: {tmp_path}/hf}}", tokens__train_steps=1
    )
    assert train(tmp_path, *folded).returncode == 0


def test_an_old_run_of_nanotron_continues_under_its_rule(tmp_path: Path) -> None:
    changes = arguments(tmp_path, model__init_method="{use_mup: true, rule: nanotron}")[1::2]
    config = parse_config(DEFAULT_CONFIG.read_text(), "default.yaml", changes)
    said = {**asdict(config.model.model_config)}
    found = model_config(said, "model:\n  init_method:\n    use_mup: true\n")
    given = model_to_json(config.model.model_config, config.multipliers)
    assert found["multipliers"] == given["multipliers"]
    assert config.multipliers.applied(config.model.model_config.decoder) == config.decoder
    named = "{use_mup: true, rule: nanotron}"
    more = arguments(tmp_path, model__init_method=named, tokens__train_steps=2)
    assert train(tmp_path, *more).returncode == 0
