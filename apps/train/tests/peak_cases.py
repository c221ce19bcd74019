"""Small trainings whose memory is planned and measured."""

from __future__ import annotations

import json

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_train.config_file import load_config

LLAMA = {
    "is_llama_config": True, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "is_qwen2_config": True, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "moe_config": {
        "num_experts": 4, "top_k": 2, "moe_intermediate_size": 96, "layers": [0, 1]},
}  # fmt: skip
SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512, "head_dim": 16,
    "num_key_value_heads": 2,
}  # fmt: skip
NEMOTRON = {
    **SIZES, "is_nemotron_h_config": True, "intermediate_size": 192, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32,
    "layers": "M-M*-",
}  # fmt: skip
QWEN3_NEXT = {
    **SIZES, "is_qwen3_next_config": True, "num_hidden_layers": 2, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32, "layers": "L*",
}  # fmt: skip
FOREIGN = SIZES | {
    "intermediate_size": 192, "num_hidden_layers": 4, "max_position_embeddings": 256,
}  # fmt: skip
OF_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
COMMON: dict[str, object] = {
    "parallelism.dp": 1, "parallelism.pp": 1, "parallelism.tp": 1,
    "parallelism.tp_mode": "ALL_REDUCE", "model.dtype": "float32",
    "data_stages.0.data.dataset": "null", "tokens.sequence_length": 128,
    "tokens.micro_batch_size": 4, "tokens.batch_accumulation_per_replica": 4,
    "tokens.train_steps": 4, "tokens.limit_val_batches": 0, "general.device": "cpu",
    "optimizer.zero_stage": 1, "optimizer.learning_rate_scheduler.lr_warmup_steps": 1,
    "optimizer.optimizer_factory.torch_adam_is_fused": "true",
}  # fmt: skip
WIDE = LLAMA | {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048,
}  # fmt: skip
FEW_KEYS = {"num_key_value_heads": 2}
LONG: dict[str, object] = {
    "parallelism.cp": 2, "parallelism.recompute": "full", "model.model_config": WIDE,
    "tokens.sequence_length": 1024, "tokens.micro_batch_size": 1,
    "tokens.batch_accumulation_per_replica": 2,
}  # fmt: skip


def foreign(family: str, **sizes: object) -> dict[str, object]:
    """Changes for a model of transformers."""
    text = json.dumps(FOREIGN | sizes | {"model_type": family})
    return {
        "model.model_config": {"is_hf_config": True, "config_json": text},
        "model.init_method": {"std": 0.02, "scaling_method": "NONE"},
    }


CASES: dict[str, dict[str, object]] = {
    "dense": {},
    "dense, bf16": {"model.dtype": "bfloat16"},
    "dense, recompute full": {"parallelism.recompute": "full"},
    "experts": {"model.model_config": EXPERTS},
    "hybrid": {"model.model_config": NEMOTRON},
    "hybrid, experts": {"model.model_config": QWEN3_NEXT},
    "ep 2": {"model.model_config": EXPERTS, "parallelism.dp": 2, "parallelism.ep": 2},
    "ep 2, wide experts": {
        "model.model_config": EXPERTS
        | {"moe_config": EXPERTS["moe_config"] | {"num_experts": 8, "moe_intermediate_size": 384}},
        "parallelism.dp": 2,
        "parallelism.ep": 2,
        "tokens.micro_batch_size": 1,
        "tokens.sequence_length": 64,
        "optimizer.zero_stage": 2,
    },
    "dense, AdamW of several kernels": {
        "optimizer.optimizer_factory.torch_adam_is_fused": "false",
        "model.model_config": LLAMA | {"hidden_size": 128, "vocab_size": 8192},
        "tokens.micro_batch_size": 1,
        "tokens.sequence_length": 64,
    },
    "dp 2, ZeRO 1": {"parallelism.dp": 2},
    "dp 2, ZeRO 3": {"parallelism.dp": 2, "optimizer.zero_stage": 3},
    "tp 2": {"parallelism.tp": 2, "parallelism.tp_mode": "REDUCE_SCATTER"},
    "cp 2": {"parallelism.cp": 2},
    "cp 2, ring of long rows": LONG | {"parallelism.cp_attention": "ring"},
    "cp 2, gather of long rows": LONG
    | {"parallelism.cp_attention": "gather", "model.model_config": WIDE | FEW_KEYS},
    "cp 2, ulysses of long rows": LONG | {"parallelism.cp_attention": "ulysses"},
    "pp 2": {"parallelism.pp": 2},
    "reproducible": {
        "general.reproducible": "true",
        "optimizer.optimizer_factory.torch_adam_is_fused": "false",
        "general.reproducible_max_tp": 1,
    },
    "reproducible, experts": {
        "general.reproducible": "true",
        "optimizer.optimizer_factory.torch_adam_is_fused": "false",
        "general.reproducible_max_tp": 2,
        "model.model_config": EXPERTS,
        "tokens.batch_accumulation_per_replica": 3,
        "tokens.micro_batch_size": 1,
    },
    "reproducible, dp 2": {
        "general.reproducible": "true",
        "optimizer.optimizer_factory.torch_adam_is_fused": "false",
        "parallelism.dp": 2,
        "tokens.batch_accumulation_per_replica": 3,
        "tokens.micro_batch_size": 1,
    },
    "LoRA": {"model.adapter": {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}},
    "LoRA, dp 2, ZeRO 3": {
        "model.adapter": {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]},
        "parallelism.dp": 2,
        "optimizer.zero_stage": 3,
    },
    "transformers' llama": foreign("llama"),
    "transformers' llama, recompute full": foreign("llama") | {"parallelism.recompute": "full"},
    "transformers' gemma2": foreign("gemma2", sliding_window=64),
    "transformers' gemma2, 16 micro-batches": foreign("gemma2", sliding_window=64)
    | {"tokens.batch_accumulation_per_replica": 16},
    "transformers' gemma2, large vocabulary": foreign("gemma2", vocab_size=8192),
    "transformers' llama, large vocabulary, bf16": foreign("llama", vocab_size=8192)
    | {"model.dtype": "bfloat16", "tokens.micro_batch_size": 8},
    "transformers' llama, pp 2": foreign("llama") | {"parallelism.pp": 2},
    "transformers' qwen3_moe": foreign("qwen3_moe", **OF_EXPERTS),
}


def config_of(case: str | dict[str, object]) -> Config:
    """Return the config of a case, by its name or its changes of ``COMMON``."""
    changes = CASES[case] if isinstance(case, str) else case
    values = COMMON | {"model.model_config": LLAMA} | changes
    flags = [f"{k}={json.dumps(v) if isinstance(v, dict) else v}" for k, v in values.items()]
    return load_config(DEFAULT_CONFIG, flags)
