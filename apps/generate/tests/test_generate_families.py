"""Texts of every family: those of transformers, on every layout, from folders and checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from kenotron_generate.cli import main

PROMPT, COUNT = "def main(argv): ", 24


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny.write_model(folder / name, name) for name in tiny.configs()}


def run(folder: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    given = ["--ckpt-path", str(folder), "--max-new-tokens", str(COUNT), "--jsonl", str(out)]
    assert main([*given, "--temperature", "0", "--no-check", *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("name", tiny.configs())
def test_greedy_texts_are_those_of_transformers(
    name: str, sizes: tuple[int, int], models: dict[str, Path], tmp_path: Path
) -> None:
    tp, pp = map(str, sizes)
    flags = ["--prompt", PROMPT, "--tp", tp, "--pp", pp]
    [result] = run(models[name], tmp_path / "out.jsonl", *flags)
    text, tokens = tiny.continued(models[name], PROMPT, COUNT)
    assert result["tokens"] == tokens
    assert result["completion"] == text


@pytest.mark.parametrize("name", ["llama", "starcoder2"])
def test_a_head_that_is_not_the_embedding_is_read_whatever_the_config_says(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / name
    shutil.copytree(models[name], folder)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = 0.4 * torch.randn(weights["model.embed_tokens.weight"].shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"]
    if name == "starcoder2":
        del config["tie_word_embeddings"]  # true is what its absence means
        (folder / "config.json").write_text(json.dumps(config))
    results = [
        run(each, tmp_path / "out.jsonl", "--prompt", PROMPT, "--tp", "2")[0]["tokens"]
        for each in (folder, models[name])
    ]
    assert results[0] == tiny.continued(folder, PROMPT, COUNT)[1] != results[1]


@pytest.mark.parametrize("name", tiny.configs())
def test_prompts_of_different_lengths_go_on_as_if_alone(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    prompts = ["a", "the second is longer", "in", "the fourth, longest of all of them"]
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    together = run(models[name], tmp_path / "out.jsonl", *flags, "--batch-size", "3", "--cp", "2")
    assert [result["index"] for result in together] == [0, 1, 2, 3]
    for prompt, result in zip(prompts, together, strict=True):
        assert result["prompt"] == prompt
        assert result["tokens"] == tiny.continued(models[name], prompt, COUNT)[1]


def test_draws_are_the_same_on_every_layout(models: dict[str, Path], tmp_path: Path) -> None:
    drawn = ["--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--prompt", PROMPT]
    more = [*drawn, "--prompt", "b", "--repetition-penalty", "1.1", "--seed", "5"]
    layouts = [
        ["--tp", "1"],
        ["--tp", "2", "--pp", "2"],
        ["--dp", "2"],
        ["--cp", "2"],
        ["--no-cache"],
    ]
    found = [
        [result["tokens"] for result in run(models["llama"], tmp_path / "out", *more, *layout)]
        for layout in layouts
    ]
    assert found == [found[0]] * len(layouts)
    other = run(models["llama"], tmp_path / "out", *more, "--seed", "6")
    assert [result["tokens"] for result in other] != found[0]
