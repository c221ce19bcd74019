"""Llama (2, 3, 3.1, 3.2): Nanotron's keys, and Hugging Face's."""

from dataclasses import dataclass

from kenotron_models.families.fields import SharedFields, check, marker_problems, raise_all
from kenotron_models.families.hf_keys import llama_from_hf, llama_to_hf
from kenotron_models.families.smollm3 import SmolLM3Config
from kenotron_models.family import Family, HuggingFace, Values
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


def _read(values: Values) -> LlamaConfig | SmolLM3Config:
    """A Llama; with biases a SmolLM3 whose layers all have positions, which is the same."""
    on_scores, on_features = (bool(values.get(name)) for name in ("attention_bias", "mlp_bias"))
    if not on_scores and not on_features:
        return LlamaConfig(**llama_from_hf(values))
    return SmolLM3Config(
        **llama_from_hf(values),
        attention_bias=on_scores,
        mlp_bias=on_features,
        no_rope_layers=(1,) * values["num_hidden_layers"],
    )


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
            "attention_dropout": (0, None),
        },
        read=_read,
        write=lambda spec: {**llama_to_hf(spec), "attention_bias": False, "mlp_bias": False},
    ),
)
