"""The tensors of a decoder and of its blocks, read off layers that are built on meta.

Nothing lists the matrices of a layer a second time: counts, operations and the names in other
formats are folds over these layouts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kenotron_dist import Axis
from kenotron_dist.placement import TensorLayout, parameter_layouts
from kenotron_models.block import Block, BlockSpec
from kenotron_models.build import Build
from kenotron_models.decoder import LayerStack, build_decoder
from kenotron_models.spec import Architecture

ONE = Build(Axis.solo("tp"), shapes_only=True)


@lru_cache(maxsize=256)
def block_layouts(block: BlockSpec, width: int) -> dict[str, TensorLayout]:
    """Return the layouts of a block's tensors on one rank, by name within the block.

    Args:
        block: what it is made of.
        width: D.
    """
    return parameter_layouts(Block(block, width, ONE), {"tp": 1, "ep": 1})


def decoder_layouts(config: Architecture, ep: int = 1) -> dict[str, TensorLayout]:
    """Return the layouts of all tensors of a decoder, by name, in the model's order.

    Args:
        config: sizes of a model.
        ep: ranks of ep; experts of transformers are cut over it from 2 on, over tp else.
    """
    build = replace(ONE, ep=Axis("ep", 0, tuple(range(ep))))
    return parameter_layouts(LayerStack(build_decoder(config, build)), {"tp": 1, "ep": ep})
