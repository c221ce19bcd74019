"""Initialisation of each parameter of a decoder."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from kenotron_dist import MATRICES, Role
from kenotron_dist.init import Constant, Initializer, Normal, Uniform
from kenotron_dist.placement import TensorLayout
from kenotron_models.part import HasFirstValues
from kenotron_models.spec import Architecture
from kenotron_models.transformers_spec import TransformersSpec

DRAWN: frozenset[Role] = frozenset({"embedding", "hidden", "residual", "output", "router"})
"""Roles of tensors whose first values are normal draws."""


def standard_init(
    config: Architecture, std: float, scaling: str = "NUM_LAYERS", residuals: int = 0
) -> Callable[[TensorLayout], Initializer]:
    """Return the rule from a tensor's role to its first values, for ``kenotron_dist.init``.

    Norms are 1 (offsets from 1: 0), biases 0, matrices and tables N(0, std^2). Matrices that write
    to the residual stream have a smaller std: it is divided by the root of twice the number of
    layers (NUM_LAYERS, as in GPT-2, Radford et al., 2019), of twice the layer's own number from 1
    (LAYER_INDEX), or by nothing (NONE). With FAN_IN, matrices are drawn evenly between
    -1/sqrt(inputs) and 1/sqrt(inputs), and ``residuals`` divides, as in Mamba's first code.

    A part may say itself how parameters begin (``HasFirstValues``): then nothing else counts.

    Args:
        config: the decoder, of which blocks are read.
        std: standard deviation of matrices and tables; with FAN_IN of tables alone.
        scaling: NUM_LAYERS, LAYER_INDEX, NONE or FAN_IN.
        residuals: with FAN_IN, additions of a layer to the residual stream: draws of matrices that
            write to it are divided by the root of that many times the number of layers. 0: by 1.

    Raises:
        ValueError: there is no such scaling. The rule raises it for a role without first values.
    """
    if scaling not in ("NONE", "NUM_LAYERS", "LAYER_INDEX", "FAN_IN"):
        raise ValueError(f"scaling {scaling!r}: it is NONE, NUM_LAYERS, LAYER_INDEX or FAN_IN")

    def rule(layout: TensorLayout) -> Initializer:
        if (own := _of_part(layout, config)) is not None:
            return own
        if layout.role == "norm":
            return Constant(1.0)
        if layout.role in ("bias", "norm_bias", "norm_offset"):
            return Constant(0.0)
        if scaling == "FAN_IN" and layout.role in MATRICES:
            depth = residuals * config.decoder.num_hidden_layers
            divided = layout.role == "residual" and depth > 0
            return Uniform(layout.shape[-1] ** -0.5 / (math.sqrt(depth) if divided else 1))
        if layout.role == "residual" and scaling in ("NUM_LAYERS", "LAYER_INDEX"):
            by_layer = scaling == "LAYER_INDEX"
            depth = config.decoder.num_hidden_layers
            if by_layer:
                depth = depth + 1 if layout.name.startswith("mtp.") else _number(layout)
            return Normal(std / math.sqrt(2 * depth))
        if layout.role in DRAWN:
            return Normal(std)
        raise ValueError(
            f"parameter {layout.name!r} of shape {list(layout.shape)} has the role "
            f"{layout.role!r}, which has no first values: {_remedy(config)}"
        )

    return rule


def _remedy(config: Architecture) -> str:
    """Return what to do about a parameter without first values."""
    if isinstance(config.decoder, TransformersSpec):
        return "read those of a model's folder with model.init_method: {path: FOLDER}"
    return (
        "declare another one on its module, such as kenotron_dist.declare_roles(module, "
        "name='norm')"
    )


def _of_part(layout: TensorLayout, config: Architecture) -> Initializer | None:
    """Return the first values that the tensor's part gives; None: none."""
    found = re.match(r"(?:layers\.(\d+)|mtp\.0\.block)\.(\w+)\.(.+)", layout.name)
    blocks = config.decoder.blocks
    number = int(found[1] or len(blocks) - 1) if found else len(blocks)
    if not found or number >= len(blocks):
        return None
    for part in blocks[number].parts:
        if part.name == found[2] and isinstance(part, HasFirstValues):
            return part.first_values(found[3])
    return None


def _number(layout: TensorLayout) -> int:
    """The number, from 1, of the decoder layer that a tensor belongs to."""
    found = re.match(r"layers\.(\d+)\.", layout.name)
    if not found:
        raise ValueError(
            f"parameter {layout.name!r} is in no numbered layer (layers.0, layers.1, ...), which "
            "scaling LAYER_INDEX needs: choose NUM_LAYERS or NONE"
        )
    return int(found[1]) + 1
