"""The arguments of Qwen3 models (no torch, no YAML here)."""

from dataclasses import dataclass, replace

from kenotron_models.config import LlamaConfig, with_window
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Sizes and constants of a Qwen3 decoder (arXiv 2505.09388): queries and keys are normed.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_llama_config: bool = False
    """Marks another class; always false."""
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
        with_window(self, self.sliding_window_size)

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean."""
        return replace(
            super().decoder,
            qk_norm=True,
            window=self.sliding_window_size,
            full_attention_layers=self.full_attention_layers,
        )
