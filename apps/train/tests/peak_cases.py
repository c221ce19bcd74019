"""Small trainings whose memory is planned and measured."""

from __future__ import annotations

import json

from kenotron_config import Config
from kenotron_train.config_file import DEFAULT_CONFIG, load_config

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
COMMON: dict[str, object] = {
    "parallelism.dp": 1, "parallelism.pp": 1, "parallelism.tp": 1,
    "parallelism.tp_mode": "ALL_REDUCE", "model.dtype": "float32",
    "data_stages.0.data.dataset": "null", "tokens.sequence_length": 128,
    "tokens.micro_batch_size": 4, "tokens.batch_accumulation_per_replica": 4,
    "tokens.train_steps": 4, "tokens.limit_val_batches": 0, "general.device": "cpu",
    "optimizer.zero_stage": 1, "optimizer.learning_rate_scheduler.lr_warmup_steps": 1,
    "optimizer.optimizer_factory.torch_adam_is_fused": "true",
}  # fmt: skip
CASES: dict[str, dict[str, object]] = {
    "dense": {},
    "dense, bf16": {"model.dtype": "bfloat16"},
    "dense, recompute full": {"parallelism.recompute": "full"},
    "experts": {"model.model_config": EXPERTS},
    "dp 2, ZeRO 1": {"parallelism.dp": 2},
    "dp 2, ZeRO 3": {"parallelism.dp": 2, "optimizer.zero_stage": 3},
    "tp 2": {"parallelism.tp": 2, "parallelism.tp_mode": "REDUCE_SCATTER"},
    "cp 2": {"parallelism.cp": 2},
    "pp 2": {"parallelism.pp": 2},
    "reproducible": {
        "general.reproducible": "true",
        "optimizer.optimizer_factory.torch_adam_is_fused": "false",
        "general.reproducible_max_tp": 1,
    },
    "reproducible, dp 2": {
        "general.reproducible": "true",
        "optimizer.optimizer_factory.torch_adam_is_fused": "false",
        "parallelism.dp": 2,
        "tokens.batch_accumulation_per_replica": 3,
        "tokens.micro_batch_size": 1,
    },
    "LoRA": {"model.adapter": {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}},
}


def config_of(name: str) -> Config:
    """Return the config of a case."""
    values = COMMON | {"model.model_config": LLAMA} | CASES[name]
    flags = [f"{k}={json.dumps(v) if isinstance(v, dict) else v}" for k, v in values.items()]
    return load_config(DEFAULT_CONFIG, flags)
