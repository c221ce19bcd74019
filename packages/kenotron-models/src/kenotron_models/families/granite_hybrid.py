"""Granite-4, and Hugging Face's names for it."""

from __future__ import annotations

import math
from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.expert_layers import expert_layers
from kenotron_models.families.expert_fields import only_experts
from kenotron_models.families.granite_hybrid_config import (
    MULTIPLIERS,
    SIZES,
    GraniteHybridConfig,
)
from kenotron_models.families.hf_keys import (
    first_mixer,
    first_mlp,
    first_of,
    llama_from_hf,
    shared_to_hf,
    sparse_to_hf,
    without_rope,
)
from kenotron_models.families.hybrid_layers import layer_words
from kenotron_models.families.mamba2 import step_limits
from kenotron_models.family import Family, FamilyConfig, HuggingFace, Values
from kenotron_models.hf_rope import FULL, LINEAR
from kenotron_models.hf_tensors import LLAMA_NAMES, Fused, Names
from kenotron_models.mamba2 import Mamba2Spec
from kenotron_models.spec import DecoderSpec

_WORDS = {Mamba2Spec: LINEAR, AttentionSpec: FULL}
_OLD_WORDS = {"mamba": LINEAR, "attention": FULL}
_CHOICES = (
    "num_local_experts", "router_aux_loss_coef", "mamba_conv_bias", "mamba_proj_bias",
    "attention_bias", "position_embedding_type",
)  # fmt: skip


def _read(values: Values) -> GraniteHybridConfig:
    kinds = values.get("layer_types") or values.get("layers_block_type")
    heads, width = values["mamba_n_heads"], values["mamba_d_head"]
    features = values["mamba_expand"] * values["hidden_size"]
    if width != "auto" and width * heads != features:
        raise ValueError(
            f"mamba_d_head: {width} was given; times mamba_n_heads ({heads}) it must be "
            f"mamba_expand * hidden_size ({features})"
        )
    multipliers: dict[str, Any] = {name: float(values[name]) for name in MULTIPLIERS}
    return GraniteHybridConfig(
        **llama_from_hf(values),
        **{name: values[name] for name in (*SIZES, *_CHOICES)},
        **multipliers,
        layer_types=None if kinds is None else tuple(_OLD_WORDS.get(word, word) for word in kinds),
        time_step_limit=step_limits(values["time_step_limit"]),
    )


def _shared(hf: HuggingFace, config: FamilyConfig) -> dict[str, Any]:
    found, turns = shared_to_hf(hf, config), first_mixer(config.decoder).rope is not None
    return found if turns else without_rope(found)


def _write(spec: DecoderSpec) -> dict[str, Any]:
    """Keys of the parts; of Mamba-2 where no layer has one, the defaults of theirs."""
    mixer, found = first_mixer(spec), expert_layers(spec)
    scale = 1.0 if spec.embedding_scale is None else spec.embedding_scale
    multipliers = (scale, mixer.factor, spec.blocks[0].residual_scale, 1 / spec.logit_scale)
    keys = {
        **sparse_to_hf(spec),
        **dict(zip(MULTIPLIERS, multipliers, strict=True)),
        "layer_types": layer_words(spec, _WORDS),
        "attention_bias": mixer.qkv_bias,
        "position_embedding_type": None if mixer.rope is None else "rope",
        "num_local_experts": 0,
    }
    if found:
        experts = only_experts(spec, found)
        keys |= {
            "shared_intermediate_size": experts.shared_features,
            "num_local_experts": experts.router.experts,
            "num_experts_per_tok": experts.router.top_k,
            "router_aux_loss_coef": experts.router.balance_loss,
        }
    else:
        keys["shared_intermediate_size"] = first_mlp(spec).features
    if (mamba := first_of(spec, Mamba2Spec)) is not None:
        keys |= _mamba_keys(mamba, spec.hidden_size)
    return keys


def _mamba_keys(mamba: Mamba2Spec, width: int) -> dict[str, Any]:
    return {
        "mamba_n_heads": mamba.heads,
        "mamba_d_head": mamba.head_dim,
        "mamba_n_groups": mamba.groups,
        "mamba_d_state": mamba.state,
        "mamba_d_conv": mamba.width,
        "mamba_expand": mamba.features // width,
        "mamba_chunk_size": mamba.chunk,
        "mamba_conv_bias": mamba.conv_bias,
        "mamba_proj_bias": mamba.bias,
        "time_step_limit": list(mamba.step_limits),
    }


_NAMES: Names = {
    **LLAMA_NAMES,
    "mamba2_norm": Fused("input_layernorm"),
    "mamba2": Fused("mamba"),
    "mamba2.in_proj": Fused("mamba.in_proj"),
    "mamba2.conv": Fused("mamba.conv1d"),
    "mamba2.norm": Fused("mamba.norm"),
    "mamba2.out_proj": Fused("mamba.out_proj"),
    "mlp.gate_up": Fused("shared_mlp.input_linear"),
    "mlp.down": Fused("shared_mlp.output_linear"),
    "experts_norm": Fused("post_attention_layernorm"),
    "experts.router": Fused("block_sparse_moe.router.layer"),
    "experts.gate_up": Fused("block_sparse_moe.input_linear"),
    "experts.down": Fused("block_sparse_moe.output_linear"),
    "experts.shared.gate_up": Fused("shared_mlp.input_linear"),
    "experts.shared.down": Fused("shared_mlp.output_linear"),
}
GRANITE_HYBRID = Family(
    marker="is_granite_hybrid_config",
    config=GraniteHybridConfig,
    hf=HuggingFace(
        model_type="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "position_embedding_type": None,
            **dict.fromkeys(MULTIPLIERS, 1.0),
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "time_step_limit": (0.0, math.inf),
            "pad_token_id": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        only={"hidden_act": ("silu",), "attention_dropout": (0, None)},
        read=_read,
        write=_write,
        shared=_shared,
        names=_NAMES,
    ),
)
