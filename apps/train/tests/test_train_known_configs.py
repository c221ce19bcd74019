"""Configs of known models: sizes as published, and layouts that fit the GPUs they are for."""

from __future__ import annotations

import re
from functools import cache

import pytest
import runs
import torch

from kenotron_config import Config, dump_config
from kenotron_models import parameter_count
from kenotron_models.hf import config_to_hf
from kenotron_train.config_file import load_config, parse_config
from kenotron_train.run.preview import preview
from kenotron_train.verify.shrink import shrink

FOLDER = runs.APP / "configs/known"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \[(\S+)\]\(\S+\.yaml\) \| (.+) \|$", README, re.MULTILINE)
TABLE = {name: cells.split(" | ") for name, cells in ROWS}
GPU = 80.0
"""GB of a GPU that the layouts are for."""
FREE = 0.2
"""Share of its memory that transfers and the allocator need."""


@cache
def known(name: str, *overrides: str) -> Config:
    return load_config(FOLDER / f"{name}.yaml", overrides)


def of_next_token(name: str) -> int:
    """Parameters without a module for multi-token prediction."""
    return parameter_count(known(name, "model.mtp=null").decoder)


def active(name: str) -> str:
    """Parameters that a token meets, in billions; the embedding counts whole."""
    spec = known(name, "model.mtp=null").decoder
    parts = [part for block in spec.blocks for part in block.parts]
    idle = sum(part.idle(spec.hidden_size) for part in parts if hasattr(part, "idle"))
    return f"{(of_next_token(name) - idle) / 1e9:.2f}B" if idle else ""


def layout(config: Config) -> str:
    """Axes that have more than one rank."""
    sizes = config.parallelism
    axes = {each: getattr(sizes, each) for each in ("pp", "dp", "cp", "tp", "ep")}
    return ", ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)


def test_every_file_has_a_row() -> None:
    assert [name for name, _ in ROWS] == sorted(TABLE)
    assert [path.stem for path in sorted(FOLDER.glob("*.yaml"))] == sorted(TABLE)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_row_is_what_check_says(name: str) -> None:
    said, config = preview(known(name)), known(name)
    assert "Cannot be run" not in said
    assert "Ignored" not in said
    parameters, _, used, tokens, ranks, axes, fullest = TABLE[name]
    assert parameters == f"{of_next_token(name):,}"
    assert used == active(name)
    assert f" steps, {tokens} tokens in all" in said
    assert f"Layout: {ranks.replace(',', '')} processes" in said
    assert axes == layout(config)
    stages = [float(gb) for gb in re.findall(r"about (\S+) GB a process", said)]
    assert len(stages) == config.parallelism.pp
    assert float(fullest) == max(stages) <= GPU * (1 - FREE)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_as_many_parameters_as_in_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = config_to_hf(known(name).model.model_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys))
    theirs = sum(each.numel() for each in model.parameters())
    biases = (x for path, x in model.named_buffers() if path.endswith("e_score_correction_bias"))
    assert of_next_token(name) == theirs + sum(each.numel() for each in biases)


def more_in_checkpoint(name: str) -> int:
    """Numbers that a published checkpoint has and our model has not."""
    spec = known(name).decoder
    table, norm = spec.vocab_size * spec.hidden_size, spec.hidden_size
    return {
        "deepseek-v3": norm + 2 * table + 41_540_496,  # scales of FP8 blocks of 128 x 128
        "glm-4.5-air": norm + 2 * table,
        "qwen3-next-80b-a3b": norm,
        "qwen3-0.6b": table,
        "gemma-3-4b": 416_866_032 + 2_950_272,  # vision tower, projector
    }.get(name, 0)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_published_checkpoint_has_these_parameters(name: str) -> None:
    count, published = parameter_count(known(name).decoder), TABLE[name][1]
    if published.endswith("B"):  # the publisher's figure: there are no safetensors
        assert f"{count / 1e9:.1f}B" == published
    else:
        assert f"{count + more_in_checkpoint(name):,}" == published


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_small_copy_can_be_compared_with_one_process(name: str) -> None:
    small = shrink(known(name), 8, 3)
    assert 1 < small.world_size <= 8
    assert parameter_count(small.decoder) < 3e6
    assert parse_config(dump_config(small), "small") == small


def test_three_models_have_a_module_for_multi_token_prediction() -> None:
    found = {name for name in TABLE if known(name).model.mtp is not None}
    assert found == {"deepseek-v3", "glm-4.5-air", "qwen3-next-80b-a3b"}
