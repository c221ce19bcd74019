"""Configs of small models, and the machine that they are planned for."""

from __future__ import annotations

import json

from kenotron_config import DEFAULT_CONFIG, Config, load_config
from kenotron_cost import machine_named

H100 = machine_named("h100")
LLAMA = {
    "is_llama_config": True, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {
    "is_qwen2_config": True, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "moe_config": {
        "num_experts": 4, "top_k": 2, "moe_intermediate_size": 96, "layers": [0, 1]},
}  # fmt: skip
VALUES = {
    "model.dtype": "bfloat16", "model.make_vocab_size_divisible_by": 1,
    "parallelism.dp": 1, "parallelism.tp": 1, "parallelism.tp_mode": "REDUCE_SCATTER",
    "tokens.sequence_length": 256, "tokens.micro_batch_size": 2,
    "tokens.batch_accumulation_per_replica": 32, "tokens.limit_val_batches": 0,
    "optimizer.zero_stage": 0, "optimizer.optimizer_factory.torch_adam_is_fused": "true",
}  # fmt: skip


def configured(model: dict, *overrides: str) -> Config:
    """Return the config of a training of a model."""
    values = VALUES | {"model.model_config": json.dumps(model)}
    return load_config(DEFAULT_CONFIG, (*(f"{k}={v}" for k, v in values.items()), *overrides))


def tiny(*overrides: str) -> Config:
    """Return the config of a Llama with two layers."""
    return configured(LLAMA, *overrides)
