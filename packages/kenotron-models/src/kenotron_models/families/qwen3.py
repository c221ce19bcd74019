"""Qwen3 (arXiv 2505.09388): queries and keys are normed head by head."""

from dataclasses import dataclass, replace
from typing import Any

from kenotron_models.families.fields import (
    SharedFields,
    check,
    marker_problems,
    raise_all,
    window_problems,
    windowed,
)
from kenotron_models.families.hf_keys import (
    llama_from_hf,
    llama_to_hf,
    windows_from_hf,
    windows_to_hf,
)
from kenotron_models.family import Family, HuggingFace, Values
from kenotron_models.norm import NormSpec
from kenotron_models.small import SmallSizes
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(SharedFields):
    """Sizes and constants of a Qwen3 decoder.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_qwen3_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    head_dim: int | None = 128
    """Features of one head; None: hidden_size over num_attention_heads."""
    sliding_window_size: int | None = None
    """Tokens that a token sees, itself counted; None: all before it."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers without the window, counted from 0."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*check(self), *window_problems(self.sliding_window_size)]
        raise_all([*found, *marker_problems(self, "is_qwen3_config")])

    def small_layers(self, sizes: SmallSizes) -> dict[str, Any]:
        """Return the keys of windows of a narrow copy."""
        return {
            "sliding_window_size": sizes.window(self.sliding_window_size),
            "full_attention_layers": sizes.some_layers(
                self.full_attention_layers, self.num_hidden_layers
            ),
        }

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        mixer = replace(self.attention(), qk_norm=NormSpec(eps=self.rms_norm_eps))
        window, full = self.sliding_window_size, self.full_attention_layers
        return self.decoder_of(windowed(mixer, window, full, self.num_hidden_layers))


def _read(values: Values) -> Qwen3Config:
    return Qwen3Config(**llama_from_hf(values), **windows_from_hf(values))


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {**llama_to_hf(spec), **windows_to_hf(spec), "attention_bias": False}


QWEN3 = Family(
    marker="is_qwen3_config",
    config=Qwen3Config,
    hf=HuggingFace(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
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
    ),
)
