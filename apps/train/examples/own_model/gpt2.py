"""A family of decoders of one's own: GPT-2 (Radford et al., 2019), and a program that trains it."""

import sys
from dataclasses import dataclass, replace

import torch
from torch import nn

from kenotron_dist import Mesh, shutdown
from kenotron_models import DecoderSpec, LlamaConfig, build_decoder
from kenotron_models.config import head_problems, size_problems
from kenotron_train import train
from kenotron_train.config import Config


@dataclass(frozen=True, kw_only=True)
class Gpt2Config(LlamaConfig):
    """Sizes of a GPT-2: learned positions, LayerNorm, biases, a plain feed-forward, tied.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    is_llama_config: bool = False
    """Marks another class; always false."""
    is_gpt2_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    hidden_act: str = "gelu_new"
    """Activation of the feed-forward; GPT-2 has this one."""
    tie_word_embeddings: bool = True
    """The head is the embedding's own matrix."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance inside every LayerNorm."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        if problems := size_problems(self) or head_problems(self):
            raise ValueError("\n".join(problems))

    @property
    def decoder(self) -> DecoderSpec:
        """What the names above mean; with this, everything else is known."""
        return replace(
            super().decoder,
            learned_positions=True,
            rope_theta=None,
            norm="layer_norm",
            norm_eps=self.layer_norm_epsilon,
            qkv_bias=True,
            out_bias=True,
            gated=False,
            activation="gelu_tanh",
            mlp_bias=True,
        )


def layers(config: Config, mesh: Mesh) -> list[tuple[str, nn.Module]]:
    """A GPT-2 of the sizes in the YAML, cut as its `parallelism` says."""
    sizes = config.decoder
    gpt2 = Gpt2Config(
        hidden_size=sizes.hidden_size,
        intermediate_size=4 * sizes.hidden_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        vocab_size=sizes.vocab_size,
        max_position_embeddings=sizes.max_position_embeddings,
    )
    return build_decoder(
        gpt2,
        mesh["tp"],
        mode=config.parallelism.mode,
        dtype=getattr(torch, config.model.dtype),
    )


if __name__ == "__main__":
    try:
        train(sys.argv[1], model=layers)
    finally:
        shutdown()
