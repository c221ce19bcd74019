"""Families with variants of attention: keys of Hugging Face both ways, checks, small copies."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_cases import SIZES, assert_read_as_written

from kenotron_dist import Axis
from kenotron_models import Build, Context, Recompute, SmallSizes, build_decoder, config_from_json
from kenotron_models.families import (
    Gemma2Config,
    Gemma3Config,
    GptOssConfig,
    OLMo2Config,
    OLMo3Config,
    Phi3Config,
    SmolLM3Config,
)
from kenotron_models.hf import config_from_hf, config_to_hf, differences
from kenotron_models.layers import AttentionSpec, Block, BlockSpec, MLPSpec, RopeScaling
from kenotron_models.mlp import ClampedSwiGLU

LINEAR = RopeScaling(factor=8.0, rope_type="linear")
YARN = RopeScaling(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False
)
S, W = "sliding_attention", "full_attention"
CONFIGS: list[Any] = [
    SmolLM3Config(**SIZES),
    SmolLM3Config(**SIZES, no_rope_layers=(0, 1, 1, 0), attention_bias=True, mlp_bias=True),
    SmolLM3Config(**SIZES, no_rope_layers=(0, 0, 0, 0)),
    SmolLM3Config(**SIZES, use_sliding_window=True, sliding_window=7, rope_scaling=YARN),
    Phi3Config(**SIZES),
    Phi3Config(
        **SIZES, partial_rotary_factor=0.5, sliding_window=9, resid_pdrop=0.1, attention_dropout=0.2
    ),
    OLMo2Config(**SIZES, attention_bias=True, tie_word_embeddings=True),
    OLMo3Config(**SIZES, sliding_window=7),
    OLMo3Config(**SIZES, rope_local_base_freq=300.0, rope_scaling=YARN, sliding_window=7),
    Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=144),
    Gemma2Config(**SIZES, attn_logit_softcapping=None, final_logit_softcapping=None),
    Gemma2Config(**SIZES, query_pre_attn_scalar=7.5, attention_bias=True, sliding_window=None),
    Gemma3Config(**SIZES, sliding_window=7, sliding_window_pattern=2, rope_scaling=LINEAR),
    Gemma3Config(**SIZES, layer_types=(W, W, S, W), final_logit_softcapping=3.0),
    GptOssConfig(**SIZES),
    GptOssConfig(
        **SIZES, layer_types=(W,) * 4, rope_scaling=None, attention_bias=False, swiglu_limit=2.0
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: type(each).__name__)
def test_what_is_written_is_read_as_the_same_model(config: Any) -> None:
    assert_read_as_written(config)


HF = {**SIZES, "hidden_act": "silu"}


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        (
            "smollm3",
            {"layer_types": [S, W, W, W]},
            "layer_types: .* but use_sliding_window is",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: .* it must be 4 times 1, or 0"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval: 0 was given"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "'longrope' was giv"),
        ("phi3", {"embd_pdrop": 0.1}, "embd_pdrop: 0.1"),
        ("phi3", {"partial_rotary_factor": 0.4}, "of the 8 features of a head it makes 3"),
        ("phi3", {"sliding_window": 0}, "sliding_window: 0 was given; it must be at least 1, or"),
        ("phi3", {"resid_pdrop": 1.0}, "resid_pdrop: 1.0 was given; it must be at least 0, below"),
        ("olmo2", {"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        ("olmo3", {"layer_types": [S, W]}, "it must be 4 times sliding_attention or full_attent"),
        ("olmo3", {"layer_types": [S] * 4, "sliding_window": None}, "but sliding_window is null"),
        ("olmo3", {"sliding_window": 0}, "sliding_window: 0 was given; it must be at least 1"),
        (
            "olmo3",
            {"rope_parameters": {S: {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention.rope_type: 'linear' was given; .* 'default'",
        ),
        ("olmo3", {"rope_parameters": {"rope_type": "default"}}, "must be a mapping with full_att"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation: 'silu' was given"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping: -1.0 was given"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0 was given; it must be"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0"),
        ("gemma3_text", {"rope_local_base_freq": -1.0}, "rope_local_base_freq: -1.0 was given"),
        ("gemma3_text", {"final_logit_softcapping": 0.0}, "final_logit_softcapping: 0.0 was given"),
        ("gemma3", {}, "model_type: 'gemma3' was given; it must be one of"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit: 0.0 was given; it must be a finite num"),
        (
            "gpt_oss",
            {"num_experts_per_tok": 129},
            "num_experts_per_tok: 129 was given; it must",
        ),
        ("gpt_oss", {"attention_dropout": 0.1}, "attention_dropout: 0.1"),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_key(
    kind: str, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        config_from_hf({**HF, "model_type": kind, **keys})


def of(kind: str, **keys: Any) -> Any:
    return config_from_hf({**HF, "model_type": kind, **keys}).decoder


def test_old_files_of_gemma3_say_their_rotary_positions_by_three_keys() -> None:
    keys = {"rope_theta": 5e5, "rope_local_base_freq": 3e3, "sliding_window_pattern": 2}
    spec = of("gemma3_text", **keys, rope_scaling={"rope_type": "linear", "factor": 8.0})
    ropes = [(each.mixer.window, each.mixer.rope) for each in spec.blocks]
    assert [window for window, _ in ropes] == [4096, None, 4096, None]
    assert (ropes[0][1].theta, ropes[0][1].scaling) == (3e3, None)
    assert (ropes[1][1].theta, ropes[1][1].scaling) == (5e5, LINEAR)
    assert spec.embedding_scale == 32**0.5 and spec.logit_cap is None
    default = of("gemma3_text", layer_types=[S, W, W, W])
    assert [each.mixer.rope.theta for each in default.blocks] == [1e4, 1e6, 1e6, 1e6]


def test_files_without_positions_have_those_of_their_family() -> None:
    [first, *_, last] = of(
        "olmo3", rope_theta=7e3, rope_scaling={"type": "yarn", "factor": 2}
    ).blocks
    assert (first.mixer.rope.theta, last.mixer.rope.theta) == (5e5, 7e3)  # as transformers has it
    assert last.mixer.rope.scaling.factor == 2 and first.mixer.rope.scaling is None
    rope = of("gpt_oss").blocks[0].mixer.rope
    assert (rope.theta, rope.scaling.factor, rope.scaling.truncate) == (150000.0, 32.0, False)
    assert of("smollm3").blocks[0].mixer.rope.theta == 2e6
    assert [each.mixer.rope is None for each in of("smollm3").blocks] == [False] * 3 + [True]


def test_every_number_of_a_stretching_is_written() -> None:
    llama3 = RopeScaling(factor=8.0)
    written = config_to_hf(SmolLM3Config(**SIZES, rope_scaling=llama3))["rope_parameters"]
    assert written["low_freq_factor"] == 1.0 and "truncate" not in written
    for truncate in (True, False):
        scaling = replace(YARN, truncate=truncate)
        written = config_to_hf(SmolLM3Config(**SIZES, rope_scaling=scaling))["rope_scaling"]
        assert written["beta_slow"] == 1.0 and written.get("truncate", True) is truncate


def test_norms_and_sinks_are_where_the_families_have_them() -> None:
    assert {each.norms for each in of("olmo2").blocks} == {"after"}
    gemma, oss = of("gemma2").blocks[0], of("gpt_oss", swiglu_alpha=1.5).blocks[1]
    assert (gemma.norms, gemma.norm.kind) == ("both", "offset_rms_norm")
    assert (gemma.mixer.cap, gemma.mixer.scale, gemma.mixer.window) == (50.0, 1 / 16, 4096)
    assert oss.mixer.sinks and oss.mixer.out_bias and oss.mixer.window is None
    assert oss.feed_forward.activation == ClampedSwiGLU(1.5, 7.0)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("norms", ["before", "after", "both"])
def test_a_block_norms_what_it_says(norms: Any, recompute: Recompute) -> None:
    attention = AttentionSpec(heads=2, kv_heads=1, head_dim=8)
    spec = BlockSpec(mixer=attention, feed_forward=MLPSpec(features=12), norms=norms)
    block = Block(spec, 16, Build(Axis.solo("tp"), device="cpu"), recompute=recompute)
    for parameter in block.parameters():
        torch.nn.init.uniform_(parameter, -1, 1)
    x, context = torch.randn(7, 16, requires_grad=True), Context(torch.arange(7)[None])
    want = x
    for part in ("attention", "mlp"):
        inner, layer = want, block.get_submodule(part)
        if norms != "after":
            weight = block.get_submodule(f"{part}_norm").weight
            inner = F.rms_norm(inner, (16,), weight, 1e-6)
        inner = layer(inner, context)
        if norms != "before":
            weight = block.get_submodule(f"{part}_post_norm").weight
            inner = F.rms_norm(inner, (16,), weight, 1e-6)
        want = want + inner
    got, tensors = block(x, context), [x, *block.parameters()]
    torch.testing.assert_close(got, want)
    pairs = (torch.autograd.grad(out.square().sum(), tensors) for out in (got, want))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert len(tensors) == (9 if norms == "both" else 7)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("layers", [2, 3])
def test_a_small_copy_has_the_same_structure(config: Any, layers: int) -> None:
    sizes = SmallSizes(
        layers=layers, period=1, heads=4, kv_heads=2, head_dim=8, vocab_size=29, tp=2, sequence=64,
        small_sequence=16, ep=2,
    )  # fmt: skip
    small = config.small(sizes)
    build_decoder(small, Build(Axis.solo("tp")))
    before, after = config.decoder, small.decoder
    assert len(after.blocks) == layers and after.logit_cap == before.logit_cap

    def kinds(spec: Any) -> set[tuple[object, ...]]:
        return {
            (each.norms, m.window is None, m.rope is None, m.cap, m.sinks, m.qk_norm_over)
            for each in spec.blocks
            for m in [each.mixer]
        }

    assert kinds(after) == kinds(before)
    assert config_from_json(json.loads(json.dumps(asdict(small)))) == small


def test_a_family_that_has_no_word_for_a_variant_refuses_it() -> None:
    capped = GptOssConfig(**SIZES)
    mixer = replace(capped.decoder.blocks[0].mixer, cap=3.0)
    blocks = (replace(each, mixer=mixer) for each in capped.decoder.blocks)
    assert "attention.cap: 3.0 and null" in differences(
        replace(capped.decoder, blocks=tuple(blocks)), capped.decoder
    )
    with pytest.raises(ValueError, match="(?s)phi3 cannot say this model.*qkv_bias: True and Fals"):
        config_to_hf(Phi3Config(**SIZES, attention_bias=True))
