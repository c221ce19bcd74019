"""Mistral in Hugging Face's names: a Llama with a window."""

from typing import Any

from kenotron_models.config_mistral import MistralConfig
from kenotron_models.hf_family import Family, Values, llama_from_hf, llama_to_hf
from kenotron_models.spec import DecoderSpec


def _read(values: Values) -> MistralConfig:
    window = values.get("sliding_window")
    return MistralConfig(**llama_from_hf(values), sliding_window_size=window)


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {**llama_to_hf(spec), "sliding_window": spec.window}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    config=MistralConfig,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    only={"hidden_act": ("silu",), "attention_dropout": (0, None), "layer_types": (None,)},
    read=_read,
    write=_write,
)
