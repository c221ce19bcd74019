"""How each parameter of a decoder begins."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from kenotron_dist import Role, TensorLayout
from kenotron_dist.init import Constant, Initializer, Normal
from kenotron_models.spec import Architecture

DRAWN: frozenset[Role] = frozenset({"embedding", "hidden", "residual", "output", "router"})
"""Roles of tensors whose first values are normal draws."""


def standard_init(
    config: Architecture, std: float, scaling: str = "NUM_LAYERS"
) -> Callable[[TensorLayout], Initializer]:
    """Return the rule from a tensor's role to its first values, for ``kenotron_dist.init``.

    Norms are 1 (offsets from 1: 0), biases 0, matrices and tables N(0, std^2). Matrices that write
    to the residual stream have a smaller std: it is divided by the root of twice the number of
    layers (NUM_LAYERS, as in GPT-2, Radford et al., 2019), of twice the layer's own number from 1
    (LAYER_INDEX), or by nothing (NONE).

    Args:
        config: the decoder, of which the number of layers is read.
        std: standard deviation of matrices and tables.
        scaling: NUM_LAYERS, LAYER_INDEX or NONE.

    Raises:
        ValueError: there is no such scaling. The rule raises it for a role without first values.
    """
    if scaling not in ("NONE", "NUM_LAYERS", "LAYER_INDEX"):
        raise ValueError(f"scaling {scaling!r}: it is NONE, NUM_LAYERS or LAYER_INDEX")

    def rule(layout: TensorLayout) -> Initializer:
        if layout.role == "norm":
            return Constant(1.0)
        if layout.role in ("bias", "norm_bias", "norm_offset"):
            return Constant(0.0)
        if layout.role == "residual" and scaling != "NONE":
            by_layer = scaling == "LAYER_INDEX"
            depth = _number(layout) if by_layer else config.decoder.num_hidden_layers
            return Normal(std / math.sqrt(2 * depth))
        if layout.role in DRAWN:
            return Normal(std)
        raise ValueError(
            f"parameter {layout.name!r} of shape {list(layout.shape)} has the role "
            f"{layout.role!r}, which has no first values: declare another one on its module, such "
            "as kenotron_dist.declare_roles(module, name='norm')"
        )

    return rule


def _number(layout: TensorLayout) -> int:
    """The number, from 1, of the decoder layer that a tensor belongs to."""
    found = re.match(r"layers\.(\d+)\.", layout.name)
    if not found:
        raise ValueError(
            f"parameter {layout.name!r} is in no numbered layer (layers.0, layers.1, ...), which "
            "scaling LAYER_INDEX needs: choose NUM_LAYERS or NONE"
        )
    return int(found[1]) + 1
