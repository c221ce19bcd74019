"""Families whose layers have different mixers: keys of Hugging Face both ways, checks, copies."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from family_cases import SIZES, assert_read_as_written

from kenotron_dist import Axis
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    Recompute,
    SmallSizes,
    build_decoder,
    config_from_json,
    cut_sizes,
)
from kenotron_models.families import GraniteHybridConfig, JambaConfig, Qwen3NextConfig
from kenotron_models.families.hybrid_layers import layer_words
from kenotron_models.hf import config_from_hf, config_to_hf
from kenotron_models.layers import (
    AttentionSpec,
    ExpertsSpec,
    GatedDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    MLPSpec,
    NormSpec,
    RopeScaling,
)

DELTA = {
    **SIZES, "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "shared_expert_intermediate_size": 40,
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
}  # fmt: skip
ON_CPU = Build(Axis.solo("tp"), device="cpu")
YARN = RopeScaling(factor=4.0, rope_type="yarn")
JAMBA = {**SIZES, "num_experts": 4, "mamba_d_state": 6, "mamba_d_conv": 3}
GRANITE = {
    **SIZES, "num_local_experts": 4, "shared_intermediate_size": 40, "mamba_n_heads": 8,
    "mamba_d_state": 6, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
}  # fmt: skip
L, A = "linear_attention", "full_attention"
CONFIGS: list[Any] = [
    Qwen3NextConfig(**DELTA),
    Qwen3NextConfig(**DELTA, layers="L*|LL", partial_rotary_factor=1.0),
    Qwen3NextConfig(**DELTA, layer_types=(A, L, L, A), attention_bias=True, mlp_only_layers=(1,)),
    Qwen3NextConfig(**DELTA, layers="****", norm_topk_prob=False),
    JambaConfig(**JAMBA, attn_layer_period=2, attn_layer_offset=1),
    JambaConfig(**JAMBA, layers="MM|*M", expert_layer_period=5, mamba_dt_rank=3),
    JambaConfig(**JAMBA | {"num_experts": 1}, layer_types=(A, L, A, L), mamba_proj_bias=True),
    GraniteHybridConfig(**GRANITE, layers="MM|*M", embedding_multiplier=12.0, logits_scaling=8.0),
    GraniteHybridConfig(
        **GRANITE | {"num_local_experts": 0},
        layer_types=(A, L, L, A),
        mamba_n_groups=2,
        position_embedding_type="rope",
        attention_bias=True,
        rope_scaling=YARN,
    ),  # fmt: skip
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: type(each).__name__)
def test_what_is_written_is_read_as_the_same_model(config: Any) -> None:
    assert_read_as_written(config)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("layers", [2, 3])
def test_a_small_copy_has_the_same_kinds_of_layers(config: Any, layers: int) -> None:
    sizes = SmallSizes(
        layers=layers, period=1, heads=4, kv_heads=2, head_dim=8, vocab_size=29, tp=2, sequence=64,
        small_sequence=16, ep=2,
    )  # fmt: skip
    small = config.small(sizes)
    build_decoder(small, Build(Axis.solo("tp")))
    kinds = [{type(b.mixer) for b in each.decoder.blocks} for each in (config, small)]
    assert kinds[0] == kinds[1] and len(small.decoder.blocks) == layers
    assert all(size % 2 == 0 for size in cut_sizes(small).values())
    assert config_from_json(json.loads(json.dumps(asdict(small)))) == small


def test_a_qwen3_next_is_gated_attention_and_delta_rules() -> None:
    spec = Qwen3NextConfig(**DELTA, mlp_only_layers=(0,), use_doc_masking=True).decoder
    assert [type(each.mixer) for each in spec.blocks] == [GatedDeltaSpec] * 3 + [AttentionSpec]
    assert isinstance(spec.blocks[0].feed_forward, MLPSpec) and spec.separate_documents
    attention, experts = spec.blocks[3].mixer, spec.blocks[1].feed_forward
    assert isinstance(attention, AttentionSpec) and attention.gate and attention.rope
    assert (attention.rope.share, attention.qk_norm) == (0.25, spec.norm)
    assert spec.norm.kind == "offset_rms_norm" == spec.blocks[0].norm.kind
    assert getattr(experts, "shared_features", 0) == 40 and getattr(experts, "shared_gate", False)
    assert cut_sizes(Qwen3NextConfig(**DELTA)) == {
        "num_attention_heads": 4, "linear_num_key_heads": 4, "shared_expert_intermediate_size": 40,
    }  # fmt: skip


def test_a_jamba_is_mamba_with_inner_norms_attention_without_positions_and_experts() -> None:
    spec = JambaConfig(**JAMBA, layers="MM*M", use_doc_masking=True).decoder
    assert [type(b.mixer) for b in spec.blocks] == [MambaSpec, MambaSpec, AttentionSpec, MambaSpec]
    assert [type(b.feed_forward) for b in spec.blocks] == [MLPSpec, ExpertsSpec] * 2
    mamba, attention = spec.blocks[0].mixer, spec.blocks[2].mixer
    assert isinstance(mamba, MambaSpec) and isinstance(attention, AttentionSpec)
    assert (mamba.inner_norm, mamba.step_rank, attention.rope) == (NormSpec(eps=1e-6), 2, None)
    assert mamba.separate_documents and attention.separate_documents
    dense = JambaConfig(**JAMBA | {"num_experts": 1}, layers="MM*M")
    assert {type(b.feed_forward) for b in dense.decoder.blocks} == {MLPSpec}
    assert cut_sizes(dense) == {
        "num_attention_heads": 4, "mamba_expand * hidden_size": 64, "intermediate_size": 48,
    }  # fmt: skip


def test_a_granite_has_multipliers_mamba2_attention_and_a_shared_feed_forward() -> None:
    spec = CONFIGS[7].decoder
    assert [type(b.mixer) for b in spec.blocks] == [
        Mamba2Spec,
        Mamba2Spec,
        AttentionSpec,
        Mamba2Spec,
    ]
    assert (spec.embedding_scale, spec.logit_scale, spec.stage_starts) == (12.0, 1 / 8, (2,))
    assert {each.residual_scale for each in spec.blocks} == {0.7}
    attention, experts = spec.blocks[2].mixer, spec.blocks[0].feed_forward
    assert isinstance(attention, AttentionSpec) and isinstance(experts, ExpertsSpec)
    assert (attention.scale, attention.rope, experts.shared_features) == (0.2, None, 40)
    assert experts.router.normalize and not experts.shared_gate
    dense = CONFIGS[8].decoder
    assert {type(b.feed_forward) for b in dense.blocks} == {MLPSpec}
    assert getattr(dense.blocks[0].mixer, "rope", None) and dense.embedding_scale is None
    assert {type(b.mixer) for b in GraniteHybridConfig(**GRANITE).decoder.blocks} == {Mamba2Spec}


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "mixer"])
def test_what_parts_add_is_scaled_and_so_are_logits(recompute: Recompute) -> None:
    spec = CONFIGS[8].decoder
    plain = replace(
        spec, logit_scale=0.25, blocks=tuple(replace(b, residual_scale=1.0) for b in spec.blocks)
    )
    stacks = [
        LayerStack(build_decoder(each, ON_CPU, recompute=again))
        for each, again in ((spec, recompute), (plain, "none"))
    ]
    with torch.no_grad():
        for name, weight in stacks[1].named_parameters():
            own = dict(stacks[0].named_parameters())[name]
            torch.nn.init.normal_(own, std=0.3)
            out = name.endswith(("out.weight", "out_proj.weight", "down.weight", "out.bias"))
            weight.copy_(own * 0.7 if out else own)
    tokens, context = torch.arange(20) * 7 % 99, Context(torch.arange(10).expand(2, 10))
    scaled, plainly = (stack(tokens, context) for stack in stacks)
    torch.testing.assert_close(scaled * 0.25, plainly, rtol=1e-5, atol=1e-5)
    scaled.square().mean().backward()
    ids = Context(context.positions_BS, outputs=torch.tensor([3, 19]))
    torch.testing.assert_close(stacks[1](tokens, ids), plainly[[3, 19]], rtol=1e-5, atol=1e-6)
    assert stacks[0].get_submodule("layers.1.mlp.down").weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (0, {"layers": "LX*L"}, r"layers: 'X' was given at place 2 of 'LX\*L'; letters are 'L\*'"),
        (0, {"layers": "L*"}, r"layers: 'L\*' was given; it must have 4 letters \(num_hidden_lay"),
        (0, {"layers": "|"}, r"layers: '\|' was given; it must have a letter of 'L\*' a layer"),
        (
            0,
            {"layers": "L||*LL"},
            r"layers: '\|' was given at place 2 of .*; there must be a layer",
        ),
        (0, {"layers": "L*LL|"}, r"layers: '\|' was given at place 5 of .*; there must be a layer"),
        (0, {"layers": "|L*LL"}, r"layers: '\|' was given at place 1 of .*; there must be a layer"),
        (2, {"layers": "L*LL"}, r"layers: 'L\*LL' was given, and layer_types, too; keep one"),
        (0, {"layer_types": (A, "rnn")}, "layer_types: .* it must be 4 times linear_attention or"),
        (
            0,
            {"linear_num_key_heads": 3},
            "linear_num_key_heads: 3 was given; it must divide linear",
        ),
        (0, {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: 0 was given; it must be at le"),
        (0, {"partial_rotary_factor": 0.2}, "of the 16 features of a head it makes 3"),
        (0, {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 was given; it must not be above"),
        (0, {"decoder_sparse_step": 5}, "no layer has experts: choose others, or a dense family"),
        (0, {"full_attention_interval": 0}, "full_attention_interval: 0 was given; it must be at"),
        (4, {"attn_layer_offset": 2}, "attn_layer_offset: 2 was given; it must be from 0 to below"),
        (4, {"expert_layer_period": 0}, "expert_layer_period: 0 was given; it must be at least 1"),
        (4, {"mamba_dt_rank": 0}, "mamba_dt_rank: 0 was given; it must be at least 1"),
        (4, {"num_experts_per_tok": 5}, "num_experts_per_tok: 5 was given; it must not be above"),
        (4, {"layers": "M-M*"}, r"layers: '-' was given at place 2 of 'M-M\*'; letters are 'M\*'"),
        (7, {"mamba_n_heads": 12}, r"mamba_n_heads: 12 was given; it must divide .* \(64\)"),
        (7, {"mamba_n_groups": 3}, r"mamba_n_groups: 3 was given; it must divide .* \(8\)"),
        (7, {"residual_multiplier": 0.0}, "residual_multiplier: 0.0 was given; it must be a finit"),
        (7, {"num_local_experts": -1}, "num_local_experts: -1 was given; it must be at least 0"),
        (7, {"num_experts_per_tok": 5}, "num_experts_per_tok: 5 was given; it must not be above"),
        (
            7,
            {"time_step_limit": (1.0, 0.5)},
            r"time_step_limit: \[1.0, 0.5\] was given; it must be",
        ),
        (
            7,
            {"position_embedding_type": "nope"},
            "position_embedding_type: 'nope' was given; it mu",
        ),
    ],
)
def test_a_wrong_value_is_named(config: int, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIGS[config], **change)


def test_old_words_and_sizes_of_granite() -> None:
    values = config_to_hf(CONFIGS[8])
    old = {**values, "layer_types": None, "layers_block_type": ["attention", "mamba"] * 2}
    assert config_from_hf(old).layer_types == (A, L, A, L)
    with pytest.raises(ValueError, match=r"mamba_d_head: 7 was given; times mamba_n_heads \(8\)"):
        config_from_hf({**values, "mamba_d_head": 7})


def test_what_their_config_cannot_say_is_named() -> None:
    with pytest.raises(ValueError, match="families of these keys have attention in some layer"):
        config_to_hf(Qwen3NextConfig(**DELTA, layers="LLLL"))
    with pytest.raises(ValueError, match=r"layers \[0, 1\], counted from 0, are not every n-th"):
        config_to_hf(JambaConfig(**JAMBA, layers="**MM"))
    with pytest.raises(ValueError, match="mix tokens by .*, and none by Attention"):
        layer_words(JambaConfig(**JAMBA, layers="*M*M").decoder, {MambaSpec: L})
