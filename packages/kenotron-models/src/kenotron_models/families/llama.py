"""Llama (2, 3, 3.1, 3.2): Nanotron's keys, and Hugging Face's."""

from dataclasses import dataclass

from kenotron_models.families.fields import SharedFields, check, marker_problems, raise_all
from kenotron_models.families.hf_keys import llama_from_hf, llama_to_hf
from kenotron_models.family import Family, HuggingFace
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(SharedFields):
    """Sizes and constants of a Llama decoder, under the names that Nanotron gives them.

    Building one checks it.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_llama_config: bool = True
    """Marks a YAML mapping as this class; always true."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        raise_all([*check(self), *marker_problems(self, "is_llama_config")])

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        return self.decoder_of([self.attention()] * self.num_hidden_layers)


LLAMA = Family(
    marker="is_llama_config",
    config=LlamaConfig,
    hf=HuggingFace(
        model_type="llama",
        architecture="LlamaForCausalLM",
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        only={
            "hidden_act": ("silu",),
            "attention_bias": (False, None),
            "mlp_bias": (False, None),
            "attention_dropout": (0, None),
        },
        read=lambda values: LlamaConfig(**llama_from_hf(values)),
        write=lambda spec: {**llama_to_hf(spec), "attention_bias": False, "mlp_bias": False},
    ),
)
