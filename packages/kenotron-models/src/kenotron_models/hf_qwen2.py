"""Qwen2 and Qwen2.5 in Hugging Face's names: queries, keys and values have biases."""

from typing import Any

from kenotron_models.config_qwen2 import Qwen2Config
from kenotron_models.hf_family import (
    Family,
    Values,
    llama_from_hf,
    llama_to_hf,
    windows_from_hf,
    windows_to_hf,
)
from kenotron_models.spec import DecoderSpec


def _read(values: Values) -> Qwen2Config:
    return Qwen2Config(**llama_from_hf(values), **windows_from_hf(values), attention_bias=True)


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {**llama_to_hf(spec), **windows_to_hf(spec)}


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    config=Qwen2Config,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_window_layers": 28,
        "sliding_window": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    only={"hidden_act": ("silu",), "attention_dropout": (0, None)},
    read=_read,
    write=_write,
)
