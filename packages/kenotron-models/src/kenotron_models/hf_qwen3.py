"""Qwen3 in Hugging Face's names: queries and keys are normed head by head."""

from typing import Any

from kenotron_models.config_qwen3 import Qwen3Config
from kenotron_models.hf_family import (
    Family,
    Values,
    llama_from_hf,
    llama_to_hf,
    windows_from_hf,
    windows_to_hf,
)
from kenotron_models.spec import DecoderSpec


def _read(values: Values) -> Qwen3Config:
    return Qwen3Config(**llama_from_hf(values), **windows_from_hf(values))


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {**llama_to_hf(spec), **windows_to_hf(spec), "attention_bias": False}


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    config=Qwen3Config,
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_window_layers": 28,
        "sliding_window": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    only={
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "attention_dropout": (0, None),
    },
    read=_read,
    write=_write,
)
