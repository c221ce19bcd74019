"""A family of decoders of one's own: GPT-2 (Radford et al., 2019), and a program that trains it."""

import sys
from dataclasses import dataclass, fields

import torch
from torch import nn

from kenotron_config import Config
from kenotron_dist import Mesh, shutdown
from kenotron_models import Build, DecoderSpec, build_decoder
from kenotron_models.families import LlamaConfig
from kenotron_models.layers import AttentionSpec, BlockSpec, MLPSpec, NormSpec
from kenotron_train import train


@dataclass(frozen=True, kw_only=True)
class Gpt2Config:
    """Sizes of a GPT-2: learned positions, LayerNorm, biases, a plain feed-forward, tied.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_gpt2_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    hidden_size: int = 768
    """Width of the residual stream, in features."""
    intermediate_size: int = 3072
    """Width of the feed-forward, in features."""
    num_hidden_layers: int = 12
    """Blocks."""
    num_attention_heads: int = 12
    """Heads of each layer."""
    vocab_size: int = 50257
    """Token numbers that exist, without padding."""
    max_position_embeddings: int = 1024
    """Longest sequence, in tokens: as many positions have embeddings."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance inside every LayerNorm."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [
            f"{each.name}: {getattr(self, each.name)} was given; it must be at least 1"
            for each in fields(self)
            if isinstance(getattr(self, each.name), int) and getattr(self, each.name) < 1
        ]
        if not found and self.hidden_size % self.num_attention_heads:
            found.append(
                f"hidden_size: {self.hidden_size} was given; it must be a multiple of "
                f"num_attention_heads ({self.num_attention_heads})"
            )
        if found:
            raise ValueError("\n".join(found))

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean; with this, everything else is known."""
        heads = self.num_attention_heads
        norm = NormSpec(kind="layer_norm", eps=self.layer_norm_epsilon)
        attention = AttentionSpec(
            heads=heads,
            kv_heads=heads,
            head_dim=self.hidden_size // heads,
            qkv_bias=True,
            out_bias=True,
            rope=None,
        )
        mlp = MLPSpec(
            features=self.intermediate_size, gated=False, activation="gelu_tanh", bias=True
        )
        block = BlockSpec(mixer=attention, feed_forward=mlp, norm=norm)
        return DecoderSpec(
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            blocks=(block,) * self.num_hidden_layers,
            norm=norm,
            learned_positions=True,
            tie_word_embeddings=True,
        )


def layers(config: Config, mesh: Mesh) -> list[tuple[str, nn.Module]]:
    """A GPT-2 of the sizes in the YAML, cut as its `parallelism` says."""
    sizes = config.model.model_config
    assert isinstance(sizes, LlamaConfig)  # whose sizes the YAML next to this file gives
    gpt2 = Gpt2Config(
        hidden_size=sizes.hidden_size,
        intermediate_size=4 * sizes.hidden_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.max_position_embeddings,
    )
    dtype = getattr(torch, config.model.dtype)
    return build_decoder(gpt2, Build(mesh["tp"], config.parallelism.mode, dtype=dtype))


if __name__ == "__main__":
    try:
        train(sys.argv[1], model=layers)
    finally:
        shutdown()
