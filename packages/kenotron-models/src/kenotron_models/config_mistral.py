"""The arguments of Mistral models (no torch, no YAML here)."""

from dataclasses import dataclass, replace

from kenotron_models.config import LlamaConfig, with_window
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Sizes and constants of a Mistral decoder (Jiang et al., arXiv 2310.06825): a Llama whose
    tokens may see a window only.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_llama_config: bool = False
    """Marks another class; always false."""
    is_mistral_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    sliding_window_size: int | None = 4096
    """Tokens that a token sees, itself counted; None: all before it."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        with_window(self, self.sliding_window_size)

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        return replace(super().decoder, window=self.sliding_window_size)
