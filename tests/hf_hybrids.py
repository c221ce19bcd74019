"""Tiny models of Hugging Face with state spaces or delta rules, one for each variation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    GraniteMoeHybridConfig,
    JambaConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    Qwen3NextConfig,
)

HYBRID = {
    "hybrid_override_pattern": "ME*-", "head_dim": 12, "mamba_num_heads": 8, "mamba_head_dim": 10,
    "ssm_state_size": 8, "n_groups": 4, "chunk_size": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5,
    "moe_shared_expert_intermediate_size": 40, "pad_token_id": None,
}  # fmt: skip
HEADS = {"num_heads": 8, "head_dim": 16, "chunk_size": 8}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
TIED = {"tie_word_embeddings": True}
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "router_aux_loss_coef": 0.0,  # theirs is part of no loss unless a call asks for it
}  # fmt: skip
DELTA = {
    **EXPERTS, "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "shared_expert_intermediate_size": 40,
}  # fmt: skip
JAMBA = {
    "num_experts": 8, "num_experts_per_tok": 3, "mamba_d_state": 8, "router_aux_loss_coef": 0.0,
    "pad_token_id": None,
}  # fmt: skip
LINEAR_TYPES = ["linear_attention", "linear_attention"]
GRANITE = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 40,
    "intermediate_size": 24, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
    "residual_multiplier": 0.7, "logits_scaling": 3.0, "mamba_n_heads": 8, "mamba_d_state": 8,
    "mamba_chunk_size": 8, "router_aux_loss_coef": 0.0,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.5}

HYBRIDS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "mamba": (MambaConfig, {}),
    "mamba-untied-bias": (
        MambaConfig,
        {
            "tie_word_embeddings": False,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "time_step_rank": 5,
            "expand": 1,
            "time_step_scale": 0.5,
        },
    ),
    "mamba-own-width": (MambaConfig, {"intermediate_size": 96}),
    "mamba2": (Mamba2Config, {**HEADS, "n_groups": 4}),
    "mamba2-one-group-tied": (
        Mamba2Config,
        {
            **HEADS,
            **TIED,
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_limit": (0.3, 0.7),
        },
    ),
    "nemotron-h": (NemotronHConfig, HYBRID),
    "nemotron-h-one-group": (
        NemotronHConfig,
        {
            **HYBRID,
            "hybrid_override_pattern": "*EM",
            "n_groups": 1,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "use_bias": True,
            "residual_in_fp32": True,
        },
    ),
    "nemotron-h-bounded-steps": (
        NemotronHConfig,
        {
            **HYBRID,
            "hybrid_override_pattern": "MM-",
            "time_step_min": 0.05,
            "time_step_limit": (0.3, 0.7),
        },
    ),
    "qwen3-next": (Qwen3NextConfig, {**DELTA, "full_attention_interval": 3}),
    "qwen3-next-tied-dense-bias": (
        Qwen3NextConfig,
        {
            **DELTA,
            **TIED,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": PARTIAL,
        },
    ),
    "jamba": (JambaConfig, {**JAMBA, "attn_layer_period": 2, "attn_layer_offset": 0}),
    "jamba-tied-dense-bias": (
        JambaConfig,
        {
            **JAMBA,
            **TIED,
            "num_experts": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 5,
            "mamba_expand": 1,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
        },
    ),
    "granite-hybrid": (
        GraniteMoeHybridConfig,
        {**GRANITE, "layer_types": [*LINEAR_TYPES, "full_attention"], "mamba_n_groups": 4},
    ),
    "granite-hybrid-tied-dense-rope": (
        GraniteMoeHybridConfig,
        {
            **GRANITE,
            **TIED,
            "layer_types": ["full_attention", *LINEAR_TYPES],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_expand": 1,
            "time_step_limit": (0.3, 0.7),
            "rope_parameters": LINEAR,
        },
    ),
}
