"""Jamba, and Hugging Face's names for it."""

from typing import Any

from kenotron_models.attention import AttentionSpec
from kenotron_models.expert_layers import expert_layers
from kenotron_models.families.expert_fields import only_experts
from kenotron_models.families.hf_keys import (
    first_of,
    llama_from_hf,
    shared_to_hf,
    without_rope,
)
from kenotron_models.families.hybrid_layers import layer_words
from kenotron_models.families.jamba_config import PLACES, SIZES, JambaConfig, periodic
from kenotron_models.family import Family, FamilyConfig, HuggingFace, Values
from kenotron_models.hf_rope import FULL, LINEAR
from kenotron_models.hf_tensors import Fused, Names, Outside, Stacked
from kenotron_models.mamba import MambaSpec
from kenotron_models.spec import DecoderSpec

_WORDS = {MambaSpec: LINEAR, AttentionSpec: FULL}


def _read(values: Values) -> JambaConfig:
    rank = values["mamba_dt_rank"]
    names = (*SIZES, *PLACES, "mamba_conv_bias", "mamba_proj_bias", "router_aux_loss_coef")
    return JambaConfig(
        **without_rope(llama_from_hf(values)),
        **{name: values[name] for name in names},
        mamba_dt_rank=None if rank == "auto" else rank,
    )


def _shared(hf: HuggingFace, config: FamilyConfig) -> dict[str, Any]:
    return without_rope(shared_to_hf(hf, config))


def _write(spec: DecoderSpec) -> dict[str, Any]:
    """Keys of the parts; of a kind that no layer has, the defaults of theirs."""
    words, routed = layer_words(spec, _WORDS), expert_layers(spec)
    attention = [i for i, word in enumerate(words) if word == FULL]
    places = (*periodic(attention, len(words)), *periodic(routed, len(words)))
    found = {
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm.eps,
        "num_experts": 1,
        **dict(zip(PLACES, places, strict=True)),
    }
    if routed:
        experts = only_experts(spec, routed)
        found |= {
            "intermediate_size": experts.features,
            "num_experts": experts.router.experts,
            "num_experts_per_tok": experts.router.top_k,
            "router_aux_loss_coef": experts.router.balance_loss,
        }
    if (mixer := first_of(spec, MambaSpec)) is not None:
        found |= {
            "mamba_d_state": mixer.state,
            "mamba_d_conv": mixer.width,
            "mamba_expand": mixer.channels // spec.hidden_size,
            "mamba_dt_rank": mixer.step_rank,
            "mamba_conv_bias": mixer.conv_bias,
            "mamba_proj_bias": mixer.bias,
        }
    return found


_NAMES: Names = {
    "attention_norm": Fused("input_layernorm"),
    "attention.qkv": Fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": Fused("self_attn.o_proj"),
    "mamba_norm": Fused("input_layernorm"),
    "mamba": Fused("mamba"),
    "mamba.in_proj": Fused("mamba.in_proj"),
    "mamba.conv": Fused("mamba.conv1d"),
    "mamba.x_proj": Fused("mamba.x_proj"),
    "mamba.dt_proj": Fused("mamba.dt_proj"),
    "mamba.dt_norm": Fused("mamba.dt_layernorm"),
    "mamba.b_norm": Fused("mamba.b_layernorm"),
    "mamba.c_norm": Fused("mamba.c_layernorm"),
    "mamba.out_proj": Fused("mamba.out_proj"),
    "mlp_norm": Fused("pre_ff_layernorm"),
    "mlp.gate_up": Fused("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down": Fused("feed_forward.down_proj"),
    "experts_norm": Fused("pre_ff_layernorm"),
    "experts.router": Fused("feed_forward.router"),
    "experts.gate_up": Stacked(
        "feed_forward.experts.{e}.gate_proj", "feed_forward.experts.{e}.up_proj"
    ),
    "experts.down": Stacked("feed_forward.experts.{e}.down_proj"),
}
JAMBA = Family(
    marker="is_jamba_config",
    config=JambaConfig,
    hf=HuggingFace(
        model_type="jamba",
        architecture="JambaForCausalLM",
        defaults={
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-6,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": "auto",
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        only={"hidden_act": ("silu",), "attention_dropout": (0, None)},
        read=_read,
        write=_write,
        shared=_shared,
        names=_NAMES,
        outside=Outside(norm="model.final_layernorm"),
    ),
)
