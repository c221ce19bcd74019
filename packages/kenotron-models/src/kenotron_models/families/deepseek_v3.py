"""DeepSeek-V3 in Hugging Face: keys of its config.json, and names of its tensors."""

import math
from typing import Any

from kenotron_models.families.deepseek_v3_config import DeepseekV3Config
from kenotron_models.families.hf_keys import shared_from_hf, sparse_to_hf
from kenotron_models.families.sigmoid_experts import (
    SIGMOID_EXPERTS,
    routing_from_hf,
    routing_to_hf,
)
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.hf_rope import rope_to_hf
from kenotron_models.hf_tensors import LLAMA_NAMES, Fused
from kenotron_models.latent_attention import LatentAttentionSpec
from kenotron_models.spec import DecoderSpec


def _scale(values: Values) -> float | None:
    """What yarn multiplies scores with in this family."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    share, factor = given.get("mscale_all_dim"), given.get("factor")
    if not share or not factor or factor <= 1:
        return None
    width = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    more = 0.1 * share * math.log(factor) + 1.0
    return float(width**-0.5 * more * more)


_SAME = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
)  # fmt: skip


def _read(values: Values) -> DeepseekV3Config:
    return DeepseekV3Config(
        **shared_from_hf(values),
        **{name: values[name] for name in _SAME},
        **routing_from_hf(values),
        rms_norm_eps=float(values["rms_norm_eps"]),
        rope_interleaved=bool(values["rope_interleave"]),
        attention_scale=_scale(values),
        router_aux_loss_coef=values.get("aux_loss_alpha") or 0.0,
    )


def _rope_keys(mixer: LatentAttentionSpec) -> dict[str, Any]:
    """Rotary keys in both spellings; scale and attention factor as the shares that say them."""
    found = rope_to_hf(mixer.rope)
    scaling = None if mixer.rope is None else mixer.rope.scaling
    if mixer.scale is None or scaling is None or scaling.factor <= 1:
        return found
    log = 0.1 * math.log(scaling.factor)
    below = round((math.sqrt(mixer.scale * math.sqrt(mixer.head_dim)) - 1) / log, 9)
    above = round(((scaling.attention_factor or 1 + log) * (below * log + 1) - 1) / log, 9)
    shares = {"mscale": above, "mscale_all_dim": below}
    for key in ("rope_parameters", "rope_scaling"):
        own = {name: value for name, value in found[key].items() if name != "attention_factor"}
        found[key] = own | shares
    return found


def _write(spec: DecoderSpec) -> dict[str, Any]:
    routing, mixer = routing_to_hf(spec), spec.blocks[0].mixer
    if not isinstance(mixer, LatentAttentionSpec):
        raise ValueError("a deepseek_v3 has latent attention")
    keys = sparse_to_hf(spec)
    del keys["head_dim"]
    return {
        **keys,
        **_rope_keys(mixer),
        "q_lora_rank": mixer.q_rank,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.head_dim - mixer.turned,
        "qk_rope_head_dim": mixer.turned,
        "v_head_dim": mixer.value_features,
        "rope_interleave": mixer.rope is not None and mixer.rope.interleaved,
        **routing,
        "attention_bias": False,
    }


DEEPSEEK_V3 = Family(
    marker="is_deepseek_v3_config",
    config=DeepseekV3Config,
    hf=HuggingFace(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        defaults={
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "rope_interleave": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        only={
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "attention_dropout": (0, None),
        },
        read=_read,
        write=_write,
        names={
            **LLAMA_NAMES,
            **SIGMOID_EXPERTS,
            "attention.q": Fused("self_attn.q_proj"),
            "attention.q_a": Fused("self_attn.q_a_proj"),
            "attention.q_norm": Fused("self_attn.q_a_layernorm"),
            "attention.q_b": Fused("self_attn.q_b_proj"),
            "attention.kv_a": Fused("self_attn.kv_a_proj_with_mqa"),
            "attention.kv_norm": Fused("self_attn.kv_a_layernorm"),
            "attention.kv_b": Fused("self_attn.kv_b_proj"),
        },
        further_layers=True,
    ),
)
