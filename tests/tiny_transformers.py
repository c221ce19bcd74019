"""Tiny configs of transformers' causal families, made from their config classes."""

from __future__ import annotations

import json
from typing import Any

SEQUENCE, VOCAB = 12, 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64, "rotary_dim": 4,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "num_shared_experts": 1,
    "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2,
    "dense_intermediate_size": 48, "intermediate_size_mlp": 48,
    "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "num_expert_group": 1,
    # latent and indexed attention
    "q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "o_lora_rank": 8, "index_head_dim": 8, "index_topk": 8, "index_n_heads": 4,
    "sliding_window": 8, "sliding_window_size": 8, "swa_head_dim": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "rel_extent": 8,
    # recurrences
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_head_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_d_state": 8, "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "chunk_size": 16, "mamba_chunk_size": 16, "n_groups": 2, "mamba_n_groups": 1,
    # others
    "unpadded_vocab_size": VOCAB, "hidden_size_per_layer_input": 8, "hc_lowrank": 8,
    "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
"""Values of the keys that a family has."""
_ALL_HEADS = {"num_key_value_heads": 4}
_LATENT = _ALL_HEADS | {"head_dim": 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
_RECURRENT = {"layer_types": ["linear_attention", "full_attention"]}
_DENSE_FIRST = {"mlp_only_layers": [0]}
_SPARSE_SECOND = {"mlp_layer_types": ["dense", "sparse"]}
OF_FAMILY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "sarvam_mla", "youtu"), _LATENT),
    **dict.fromkeys(
        ("axk2", "deepseek_v2", "deepseek_v32", "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa",
         "minicpm3"), _ALL_HEADS),
    **dict.fromkeys(("lara_mini", "qwen3_5_moe_text", "qwen3_5_text"), _RECURRENT),
    **dict.fromkeys(("flint", "qwen2_moe", "qwen3_moe"), _DENSE_FIRST),
    **dict.fromkeys(("beam", "cohere2_moe", "inkling_text", "mellum"), _SPARSE_SECOND),
    "cohere_compass_text": _TWO_KINDS | {
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}},
    "doge": {"is_moe": True},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "expansion_ratio": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"moe_layers": [1]},
    "longcat_flash": _LATENT | {"num_layers": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_next": _RECURRENT | _DENSE_FIRST,
}  # fmt: skip
"""Values next to those: for variants that have all names of a family's plan."""
MULTIMODAL = ("llama4", "phi4_multimodal")
"""Families of images and sounds, whose text models are families of their own or are not small."""


def families() -> list[str]:
    """List the causal families of transformers that have a plan for tp."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return [kind for kind in kinds if getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None)]


def tiny_config(kind: str, **changes: Any) -> Any:
    """Return a config of a family, of tens of thousands of parameters, that drops nothing."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = {*CONFIG_MAPPING[kind]().to_dict()}
    values = {key: value for key, value in SIZES.items() if key in known}
    config = CONFIG_MAPPING[kind](**(values | OF_FAMILY.get(kind, {}) | changes))
    for key, value in config.to_dict().items():
        if ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def tiny_json(kind: str, **changes: Any) -> str:
    """Return the contents of its config.json."""
    return json.dumps(tiny_config(kind, **changes).to_dict())
