"""Mistral (Jiang et al., arXiv 2310.06825): attention within a window."""

from dataclasses import dataclass
from typing import Any

from kenotron_models.families.fields import (
    SharedFields,
    check,
    marker_problems,
    raise_all,
    window_problems,
    windowed,
)
from kenotron_models.families.hf_keys import first_mixer, llama_from_hf, llama_to_hf
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class MistralConfig(SharedFields):
    """Sizes and constants of a Mistral decoder: tokens may see a window only.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_mistral_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    sliding_window_size: int | None = 4096
    """Tokens that a token sees, itself counted; None: all before it."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*check(self), *window_problems(self.sliding_window_size)]
        raise_all([*found, *marker_problems(self, "is_mistral_config")])

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of windows of a narrow copy."""
        return {"sliding_window_size": sizes.window(self.sliding_window_size)}

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        window, layers = self.sliding_window_size, self.num_hidden_layers
        return self.decoder_of(windowed(self.attention(), window, (), layers))


def _read(values: Values) -> MistralConfig:
    window = values.get("sliding_window")
    return MistralConfig(**llama_from_hf(values), sliding_window_size=window)


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {**llama_to_hf(spec), "sliding_window": first_mixer(spec).window}


MISTRAL = Family(
    marker="is_mistral_config",
    config=MistralConfig,
    hf=HuggingFace(
        model_type="mistral",
        architecture="MistralForCausalLM",
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
    ),
)
