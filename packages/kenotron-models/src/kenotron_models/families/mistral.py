"""Mistral (Jiang et al., arXiv 2310.06825): attention within a window."""

from dataclasses import dataclass

from kenotron_models.families.decoder_keys import windowed
from kenotron_models.families.keys import marker, with_default
from kenotron_models.families.window_keys import WindowKeys
from kenotron_models.family import Family, HuggingFace
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class MistralConfig(WindowKeys):
    """Sizes and constants of a Mistral decoder: tokens may see a window only."""

    is_mistral_config: bool = marker()
    """Marks a YAML mapping as this class; always true."""
    sliding_window_size: int | None = with_default(WindowKeys, "sliding_window_size", 4096)

    @property
    def decoder(self) -> DecoderSpec:
        """Decoder that the names above describe."""
        window, layers = self.sliding_window_size, self.num_hidden_layers
        return self.decoder_of(windowed(self.attention(), window, (), layers))


MISTRAL = Family(
    marker="is_mistral_config",
    config=MistralConfig,
    hf=HuggingFace(
        model_type="mistral",
        architecture="MistralForCausalLM",
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
        only={"layer_types": (None,)},
    ),
)
