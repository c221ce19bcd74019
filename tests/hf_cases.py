"""Tiny models of Hugging Face with random weights, one for each variation that we can say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hf_hybrids import EXPERTS, HYBRIDS, LINEAR, PARTIAL, TIED
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

TOKENS = (torch.arange(2 * 24) * 37 % 251).view(2, 24)
"""(B, S)."""
SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
RECURRENT = {
    **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
    "state_size": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
"""Sizes of the models without attention."""
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_theta": 10000.0,
}
SIGMOID = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "num_key_value_heads": 8, "n_group": 4, "topk_group": 2, **SIGMOID,
}  # fmt: skip
UNPADDED = {"pad_token_id": None}  # theirs is outside of a small vocabulary
TYPES = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 5,
}
LOCAL = {"rope_type": "default", "rope_theta": 500.0}
GEMMA = {**TYPES, "head_dim": 12, "query_pre_attn_scalar": 20, "tie_word_embeddings": True}
GPT_OSS = {
    **TYPES, "head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3,
    "router_aux_loss_coef": 0.0,
}  # fmt: skip
ROUTED = {"num_experts": 6, "num_experts_per_tok": 3, "router_aux_loss_coef": 0.0}

CASES: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied-llama3": (LlamaConfig, {**TIED, "rope_parameters": LLAMA3}),
    "llama-mqa-linear": (LlamaConfig, {"num_key_value_heads": 1, "rope_parameters": LINEAR}),
    "llama-head-dim": (LlamaConfig, {"head_dim": 12}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "mistral-window": (MistralConfig, {"sliding_window": 5}),
    "mistral-tied": (MistralConfig, {**TIED, "sliding_window": None}),
    "qwen2-tied": (Qwen2Config, TIED),
    "qwen2-window": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {"head_dim": 12}),
    "qwen3-tied-yarn": (Qwen3Config, {**TIED, "head_dim": 8, "rope_parameters": YARN}),
    "starcoder2": (Starcoder2Config, {**TIED, "sliding_window": 7}),
    "starcoder2-mqa-untied": (Starcoder2Config, {"num_key_value_heads": 1}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "router_aux_loss_coef": 0.0}),
    "qwen2-moe": (
        Qwen2MoeConfig,
        {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-tied": (
        Qwen3MoeConfig,
        {**TIED, **EXPERTS, "head_dim": 12, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    **HYBRIDS,
    "deepseek-v3": (DeepseekV3Config, LATENT),
    "deepseek-v3-yarn": (
        DeepseekV3Config,
        {
            **LATENT,
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "olmoe": (OlmoeConfig, {**ROUTED, "num_key_value_heads": None}),
    "olmoe-tied-gqa": (OlmoeConfig, {**TIED, **ROUTED, "norm_topk_prob": True}),
    "olmoe-mqa": (OlmoeConfig, {**ROUTED, "num_key_value_heads": 1}),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2, **UNPADDED}),
    "smollm3-tied-window": (
        SmolLM3Config,
        {
            **TIED,
            **TYPES,
            **UNPADDED,
            "use_sliding_window": True,
            "no_rope_layers": [0, 1, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": YARN | {"rope_theta": 3000.0},
        },
    ),  # fmt: skip
    "phi3": (Phi3Config, {"num_key_value_heads": None, **UNPADDED}),
    "phi3-tied-partial-window": (
        Phi3Config,
        {**TIED, **UNPADDED, "rope_parameters": PARTIAL, "sliding_window": 5},
    ),
    "olmo2": (Olmo2Config, {}),
    "olmo2-tied-bias": (Olmo2Config, {**TIED, "attention_bias": True}),
    "olmo3": (
        Olmo3Config,
        {
            **TYPES,
            "rope_parameters": {"sliding_attention": LOCAL, "full_attention": YARN},
        },
    ),
    "gemma2": (
        Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5},
    ),
    "gemma2-untied-uncapped": (
        Gemma2Config,
        {
            **GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),  # fmt: skip
    "gemma3": (
        Gemma3TextConfig,
        {**GEMMA, "rope_parameters": {"sliding_attention": LOCAL, "full_attention": LINEAR}},
    ),
    "gemma3-capped": (Gemma3TextConfig, {**GEMMA, "final_logit_softcapping": 2.5}),
    "gpt-oss": (GptOssConfig, {**GPT_OSS, "rope_parameters": {**YARN, "truncate": False}}),
    "gpt-oss-tied-clamped": (
        GptOssConfig,
        {**GPT_OSS, **TIED, "swiglu_limit": 0.05, "swiglu_alpha": 1.5, "attention_bias": False},
    ),
    "glm4-moe": (
        Glm4MoeConfig,
        {**SIGMOID, "head_dim": 12, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "glm4-moe-tied-norm": (
        Glm4MoeConfig,
        {
            **TIED,
            **SIGMOID,
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
        },
    ),
}


def config_of(case: str, **more: Any) -> PreTrainedConfig:
    """The config of a case, with further keys."""
    kind, changes = CASES[case]
    sizes = RECURRENT if kind in (MambaConfig, Mamba2Config) else SIZES
    return kind(**{**sizes, **changes, **more})


def make(case: str, **more: Any) -> PreTrainedModel:
    """A model of a case whose every weight, bias and norm is random, and of ordinary size."""
    model = AutoModelForCausalLM.from_config(config_of(case, **more))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draws = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(ordinary(name, draws))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    return model


def ordinary(name: str, draws: torch.Tensor) -> torch.Tensor:
    """Values of a parameter as a training leaves them, none of them a first value.

    Steps of state spaces are between 1e-4 and 2: limits and smallest steps are reached.
    """
    *_, module, kind = ["", *name.split(".")]
    if kind == "weight" and "norm" in module:
        return 1 + 0.2 * draws
    if kind == "A_log":
        return (1 + 4 * draws.abs()).log()
    if kind == "D":
        return 1 + 0.3 * draws
    if kind == "dt_bias" or (module, kind) == ("dt_proj", "bias"):
        return 2.5 * draws - 3
    if kind == "sinks":
        return draws
    return 0.2 * draws if kind.endswith("bias") else 0.1 * draws


def save(case: str, folder: Path, **options: Any) -> PreTrainedModel:
    """The model of a case, which is written to a folder too."""
    model = make(case)
    model.save_pretrained(folder, **options)
    return model
