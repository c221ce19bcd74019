"""Keys of models that show in a training alone: what they are changed to, and in which model."""

from __future__ import annotations

from typing import Any

from key_changes import LLAMA, MAMBA, QWEN

SIZES = {key: value for key, value in LLAMA.items() if key != "is_llama_config"}
STARCODER = {
    "is_starcoder2_config": True, "vocab_size": 257, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    "num_kv_heads": 2,
}  # fmt: skip
PHI = {**SIZES, "is_phi3_config": True}
BALANCED = {**SIZES, "is_mixtral_config": True, "num_local_experts": 4, "router_aux_loss_coef": 0.1}
GLM = {
    **SIZES, "is_glm4_moe_config": True, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 8, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
QWEN_EXPERTS = {
    **QWEN, "moe_config": {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 8}
}  # fmt: skip
MAMBA2 = {
    "is_mamba2_config": True, "vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 2,
    "num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8,
}  # fmt: skip
OF_MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    "z_loss_enabled": ({**LLAMA, "z_loss_coefficient": 0.1}, True),
    "attn_pdrop": (STARCODER, 0.2),
    "embd_pdrop": (STARCODER, 0.2),
    "resid_pdrop": (STARCODER, 0.2),
    "attention_dropout": (PHI, 0.2),
    "router_aux_loss_coef": (BALANCED, 0.5),
    "router_aux_loss_type": (BALANCED, "all_layers"),
    "router_jitter_noise": (BALANCED, 0.1),
    "expert_capacity_factor": (BALANCED, 0.5),
    "router_bias_rate": (GLM, 0.1),
    "moe_config.router_z_loss_coef": (QWEN_EXPERTS, 0.1),
    "residual_in_fp32": (MAMBA, False),
    "ssm_cfg.dt_init": (MAMBA, "constant"),
    "ssm_cfg.dt_init_floor": (MAMBA, 0.02),
    "ssm_cfg.dt_max": (MAMBA, 0.2),
    "ssm_cfg.dt_min": (MAMBA, 0.01),
    "ssm_cfg.dt_scale": (MAMBA, 0.5),
    "time_step_floor": (MAMBA2, 0.02),
    "time_step_max": (MAMBA2, 0.2),
    "time_step_min": (MAMBA2, 0.01),
}
"""Keys of models that a forward pass of ordinary weights does not show: a model, and a value."""
