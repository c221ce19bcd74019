"""How each parameter of a decoder begins, and which layers cost what."""

from __future__ import annotations

import math
from collections.abc import Callable

from kenotron_dist.init import Constant, Initializer, Normal
from kenotron_models.spec import Architecture


def standard_init(
    config: Architecture, std: float, scaling: str = "NUM_LAYERS"
) -> Callable[[str], Initializer]:
    """Norms 1, biases 0, matrices N(0, std^2), with less for the two that write to the residual.

    ``scaling``: their std is divided by the root of twice the number of layers (NUM_LAYERS, as in
    GPT-2, Radford et al., 2019), of twice the layer's own number from 1 (LAYER_INDEX), or by
    nothing (NONE).

    Returns the rule from a parameter's name to its initializer, for ``kenotron_dist.init``. Raises
    ValueError for another scaling.
    """
    if scaling not in ("NONE", "NUM_LAYERS", "LAYER_INDEX"):
        raise ValueError(f"scaling {scaling!r}: it is NONE, NUM_LAYERS or LAYER_INDEX")

    def rule(name: str) -> Initializer:
        if name.endswith("norm.weight"):
            return Constant(1.0)
        if name.endswith(".bias"):
            return Constant(0.0)
        if name.endswith(("attention.out.weight", "mlp.down.weight")) and scaling != "NONE":
            index = int(name.removeprefix("layers.").split(".")[0]) + 1
            depth = config.decoder.num_hidden_layers if scaling == "NUM_LAYERS" else index
            return Normal(std / math.sqrt(2 * depth))
        return Normal(std)

    return rule


def layer_costs(config: Architecture) -> list[float]:
    """Work of every layer of ``build_decoder``, in multiply-adds a token, to balance stages.

    Attention counts its four projections as if all heads had their own keys and values, the scores
    not at all; embedding and norm are free.
    """
    spec = config.decoder
    attention = 4 * spec.num_attention_heads * spec.head_dim * spec.hidden_size
    mlp = (3 if spec.gated else 2) * spec.intermediate_size * spec.hidden_size
    head = spec.vocab_size * spec.hidden_size
    return [0.0, *[float(attention + mlp)] * spec.num_hidden_layers, 0.0, float(head)]
