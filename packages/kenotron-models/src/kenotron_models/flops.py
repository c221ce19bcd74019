"""Floating-point operations and parameters of a decoder, counted from its sizes.

A multiply-add counts two. Two conventions are in use for the scores of attention: the full square,
although half of it is masked (`causal=False`: Nanotron, PaLM's MFU), and what a token really sees
(`causal=True`: Megatron-LM since 2024, FlashAttention).
"""

from __future__ import annotations

import math

from kenotron_dist import MATRICES
from kenotron_dist.placement import TensorLayout
from kenotron_models.block import BlockSpec
from kenotron_models.expert_layers import expert_layers
from kenotron_models.mtp import mtp_work
from kenotron_models.part import Sparse
from kenotron_models.shapes import ONE, block_layouts
from kenotron_models.spec import Architecture
from kenotron_models.transformers_block import TransformersBlock
from kenotron_models.transformers_counts import (
    element_count,
    flops,
    layer_flops,
    stacked_matrices,
    work,
)
from kenotron_models.transformers_spec import TransformersSpec


def forward_flops(
    config: Architecture, batch: int, sequence: int, *, causal: bool = False
) -> float:
    """Count the operations of one forward pass over (batch, sequence) tokens.

    Products with matrices, and what mixers compute between them. ``causal``: only scores that are
    seen, of the window where the layer has one; documents are not known here and count as one.
    """
    spec, tokens = config.decoder, batch * sequence
    if isinstance(spec, TransformersSpec):
        return flops(spec, batch, sequence, causal=causal)
    blocks = sum(
        sum(block_flops(block, spec.hidden_size, batch, sequence, causal=causal))
        for block in spec.trained_blocks
    )
    head = spec.hidden_size * spec.vocab_size
    head += len(spec.mtp_blocks) * (head + 2 * spec.hidden_size**2)
    return float(2 * tokens * head + blocks)


def block_flops(
    block: BlockSpec | TransformersBlock,
    width: int,
    batch: int,
    sequence: int,
    *,
    causal: bool = False,
) -> tuple[int, int]:
    """Count the operations of one forward pass of a block over (batch, sequence) tokens.

    Args:
        block: what it is made of.
        width: D.
        batch: rows.
        sequence: tokens of a row.
        causal: as for ``forward_flops``.

    Returns:
        Those of products with matrices, and those of what mixers compute between them.
    """
    if isinstance(block, TransformersBlock):
        return layer_flops(block.spec, block.number, batch, sequence, causal=causal)
    mixing = sum(part.mixing_flops(batch, sequence, causal=causal) for part in block.parts)
    return 2 * batch * sequence * _matrices(block, width), mixing


def training_flops(
    config: Architecture, batch: int, sequence: int, *, causal: bool = False
) -> float:
    """Count forward and backward: three forward passes; nothing computed again counts."""
    return 3 * forward_flops(config, batch, sequence, causal=causal)


def parameter_count(config: Architecture) -> int:
    """Count the parameters of the whole model, a tied head once."""
    spec = config.decoder
    if isinstance(spec, TransformersSpec):
        return element_count(spec)
    width = spec.hidden_size
    blocks = sum(_elements(block_layouts(block, width)) for block in spec.trained_blocks)
    matrices = 1 if spec.tie_word_embeddings else 2
    places = spec.max_position_embeddings * width if spec.learned_positions else 0
    norm = sum(p.numel() for p in spec.norm.build(width, ONE).parameters())
    further = len(spec.mtp_blocks) * (2 * norm + 2 * width**2)
    return blocks + matrices * spec.vocab_size * width + places + norm + further


def expert_parameters(config: Architecture) -> int:
    """Count the parameters that ep divides: those of experts, without routers."""
    spec = config.decoder
    found = (block_layouts(block, spec.hidden_size) for block in spec.trained_blocks)
    return sum(
        _elements({name: each for name, each in layouts.items() if each.grid == "expert"})
        for layouts in found
    )


def expert_count(config: Architecture) -> int:
    """Return the fewest experts of a layer, which ep has to divide; 1 where there are none."""
    spec = config.decoder
    if isinstance(spec, TransformersSpec):
        return stacked_matrices(spec)
    kinds = expert_layers(spec).values()
    return min((kind.router.experts for kind in kinds), default=1)


def layer_costs(config: Architecture) -> list[float]:
    """Return the work of every layer of ``build_decoder``, in multiply-adds a token.

    For balancing stages: a block costs what its parts say; embedding and norm are free.
    """
    spec = config.decoder
    if isinstance(spec, TransformersSpec):
        return [*work(spec)]
    blocks = [float(sum(p.cost(spec.hidden_size) for p in block.parts)) for block in spec.blocks]
    heads = 1 + len(spec.mtp_blocks)
    return [0.0, *blocks, *mtp_work(spec), 0.0, float(heads * spec.vocab_size * spec.hidden_size)]


def _matrices(block: BlockSpec, width: int) -> int:
    """Elements of the matrices of a block that a token uses."""
    found = block_layouts(block, width)
    used = {n: each for n, each in found.items() if each.role in MATRICES or each.role == "router"}
    idle = sum(part.idle(width) for part in block.parts if isinstance(part, Sparse))
    return _elements(used) - idle


def _elements(layouts: dict[str, TensorLayout]) -> int:
    return sum(math.prod(layout.shape) for layout in layouts.values())
