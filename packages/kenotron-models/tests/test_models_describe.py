"""The plan of a model in words: every tensor once, equal blocks together."""

from __future__ import annotations

import re

from kenotron_models import describe, parameter_count
from kenotron_models.families import LlamaConfig, MixtralConfig, MoEConfig, Qwen2Config

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 5, "vocab_size": 29, "max_position_embeddings": 64,
}  # fmt: skip


def test_a_line_has_name_shape_role_and_cut() -> None:
    lines = describe(LlamaConfig(**SIZES).decoder).splitlines()
    assert lines[0] == "embedding" and lines[2] == "layers.0 ... layers.4"
    words = [re.split(r"  +", line.strip()) for line in lines]
    assert words[4] == [
        "attention.qkv.weight",
        "128 x 64",
        "hidden",
        "tp cuts dim 0 (64 + 32 + 32)",
    ]
    assert words[5] == ["attention.out.weight", "64 x 64", "residual", "tp cuts dim 1"]
    assert words[3] == ["attention_norm.weight", "64", "norm", "whole"]
    assert lines[-2] == "head" and words[-1][3] == "tp cuts dim 0"


def test_shapes_add_up_to_the_parameters_of_the_model() -> None:
    spec = MixtralConfig(**SIZES, num_local_experts=4).decoder
    total, times = 0, 1
    for line in describe(spec).splitlines():
        if not line.startswith(" "):
            ends = [int(n) for n in re.findall(r"layers\.(\d+)", line)] or [0]
            times = ends[-1] - ends[0] + 1
            continue
        size = 1
        for n in re.split(r"  +", line.strip())[1].split(" x "):
            size *= int(n.replace(",", ""))
        total += times * size
    assert total == parameter_count(spec)
    assert "ep cuts dim 0" in describe(spec) and "gradient summed over tp" in describe(spec)


def test_a_tied_tensor_is_named_by_both_and_kinds_of_blocks_are_apart() -> None:
    tied = describe(LlamaConfig(**SIZES, tie_word_embeddings=True).decoder)
    assert tied.count("one tensor: embedding.weight and head.weight") == 2
    moe = {"layers": (1, 2), "num_experts": 4, "moe_intermediate_size": 8}
    heads = [
        line
        for line in describe(Qwen2Config(**SIZES, moe_config=MoEConfig(**moe)).decoder).splitlines()
        if line.startswith("layers")
    ]
    assert heads == ["layers.0", "layers.1 ... layers.2", "layers.3 ... layers.4"]
