"""Llama (2, 3, 3.1, 3.2): Nanotron's keys, and Hugging Face's."""

from dataclasses import dataclass
from typing import Any

from kenotron_models.families.hf_keys import keys_from_hf, read_config
from kenotron_models.families.keys import marker
from kenotron_models.families.rope_keys import LlamaKeys, NanotronKeys
from kenotron_models.families.smollm3 import SmolLM3Config
from kenotron_models.family import Family, FamilyConfig, HuggingFace, Values
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(NanotronKeys, LlamaKeys):
    """Sizes and constants of a Llama decoder, under the names that Nanotron gives them."""

    is_llama_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        return self.decoder_of([self.attention()] * self.num_hidden_layers)

    @classmethod
    def write_hf(cls, spec: DecoderSpec) -> dict[str, Any]:
        """Return the keys of biases, of which there are none."""
        return super().write_hf(spec) | {"attention_bias": False, "mlp_bias": False}


def _read(values: Values) -> FamilyConfig:
    """A Llama; with biases a SmolLM3 whose layers all have positions, which is the same."""
    names = ("attention_bias", "mlp_bias")
    biases: dict[str, Any] = {name: bool(values.get(name)) for name in names}
    if not any(biases.values()):
        return read_config(LlamaConfig, values)
    plain = keys_from_hf(LlamaConfig, values)
    return SmolLM3Config(**plain, **biases, no_rope_layers=(1,) * values["num_hidden_layers"])


LLAMA = Family(
    marker="is_llama_config",
    config=LlamaConfig,
    hf=HuggingFace(
        model_type="llama",
        architecture="LlamaForCausalLM",
        defaults={"max_position_embeddings": 2048},
        read=_read,
    ),
)
