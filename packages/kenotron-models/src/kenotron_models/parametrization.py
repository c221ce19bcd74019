"""How each parameter of a decoder begins, and which layers cost what."""

from __future__ import annotations

import math
from collections.abc import Callable

from kenotron_dist.init import Constant, Initializer, Normal
from kenotron_models.config import LlamaConfig


def standard_init(config: LlamaConfig, std: float) -> Callable[[str], Initializer]:
    """Norms 1; matrices N(0, std^2); the two that write to the residual stream std / sqrt(2L).

    Returns the rule from a parameter's name to its initializer, for ``kenotron_dist.init``. The
    scaled residual outputs are GPT-2's (Radford et al., 2019).
    """
    residual = Normal(std / math.sqrt(2 * config.num_hidden_layers))

    def rule(name: str) -> Initializer:
        if name.endswith("norm.weight"):
            return Constant(1.0)
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            return residual
        return Normal(std)

    return rule


def layer_costs(config: LlamaConfig) -> list[float]:
    """Work of every layer of ``build_decoder``, in multiply-adds a token, to balance stages.

    Attention counts its four projections as if all heads had their own keys and values, the scores
    not at all; embedding and norm are free.
    """
    attention = 4 * config.num_attention_heads * config.head_dim * config.hidden_size
    mlp = 3 * config.intermediate_size * config.hidden_size
    head = config.vocab_size * config.hidden_size
    return [0.0, *[float(attention + mlp)] * config.num_hidden_layers, 0.0, float(head)]
