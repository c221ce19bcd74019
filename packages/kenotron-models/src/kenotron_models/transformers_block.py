"""A layer of a model of transformers, in the place of a ``BlockSpec`` where blocks are measured.

Its own code runs on device meta. What it is called with (masks, rotary angles) is made on the CPU:
transformers asks for values there.

Shapes: B rows, S tokens of a row, T = B * S, D hidden.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from kenotron_dist import Axis
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.recompute import Recompute
from kenotron_models.transformers_attention import OWN_ATTENTION
from kenotron_models.transformers_layers import LayerEntry, transformers_layers
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_tp import TPMode

LARGEST_MASK = 1 << 28
"""Elements of a mask (S, S) that is made to measure a layer."""


@dataclass(frozen=True)
class TransformersBlock:
    """A layer of a model; layers of one kind are equal."""

    spec: TransformersSpec
    number: int
    """Of the first layer of its kind."""


@lru_cache(maxsize=4)
def transformers_blocks(spec: TransformersSpec) -> tuple[TransformersBlock, ...]:
    """Return the layers of a model; none where it is not split into layers.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the model cannot be trained here.
    """
    values = json.loads(spec.config_json)
    kinds = values.get("layer_types") or values.get("text_config", {}).get("layer_types") or ()
    first: dict[Hashable, int] = {}
    found = []
    for name, layer in transformers_layers(spec, Build(Axis.solo("tp")), ("none",) * spec.depth):
        if not isinstance(layer, LayerEntry):
            continue
        number = len(found)
        shapes = tuple((name, each.shape) for name, each in layer.block.named_parameters())
        kind = kinds[number] if number < len(kinds) else None
        key = type(layer.block), shapes, kind
        found.append(TransformersBlock(spec, first.setdefault(key, number)))
    return tuple(found)


def transformers_block_on_meta(
    block: TransformersBlock,
    rows: int,
    sequence: int,
    dtype: torch.dtype,
    recompute: Recompute,
    axes: Mapping[str, Axis],
    mode: TPMode = TPMode(),
) -> tuple[nn.Module, Tensor, Context]:
    """Return a layer on device meta, its input (T, D) or (T/t, D), and a micro-batch's context.

    Args:
        block: which one.
        rows: B.
        sequence: S.
        dtype: of parameters and activations.
        recompute: ``none`` or ``full``.
        axes: ``tp``, and ``ep`` where experts are cut; without a group.
        mode: communication over tp.

    Raises:
        ValueError: its mask is too large to be made here.
    """
    spec = block.spec
    if spec.attention != OWN_ATTENTION and sequence**2 > LARGEST_MASK:
        raise ValueError(
            f"model.model_config.attn_implementation: {spec.attention} was given; masks of "
            f"{sequence:,} tokens are too large to be made here: set it to {OWN_ATTENTION}"
        )
    build = Build(axes["tp"], mode, dtype=dtype, ep=axes.get("ep", Axis.solo("ep")))
    again: list[Recompute] = [recompute] * spec.depth
    entries = dict(transformers_layers(spec, build, again))
    layer = entries[f"layers.{block.number}"]
    assert isinstance(layer, LayerEntry)
    return layer, *input_on_meta(layer, rows, sequence, spec.hidden_size, dtype)


def input_on_meta(
    layer: LayerEntry, rows: int, sequence: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Context]:
    """Return the input (T, D) or (T/t, D) of a layer, and a micro-batch's context, on meta.

    Args:
        layer: cut over tp, on meta.
        rows: B.
        sequence: S.
        width: D.
        dtype: of hidden features.
    """
    context = Context(torch.arange(sequence, device="meta").expand(rows, sequence))
    layer.skeleton.calls_on_meta(width, dtype, context)
    held = -(-rows * sequence // layer.tokens_over.size)
    return torch.empty(held, width, dtype=dtype, device="meta", requires_grad=True), context
