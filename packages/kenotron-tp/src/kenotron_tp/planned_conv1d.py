"""GPT-2's ``Conv1D``, a linear layer whose weight is (I, O), cut like a linear layer.

Shapes: I input features, O output features; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from kenotron_dist import Axis
from kenotron_dist.placement import Chunk, Placements, Shard
from kenotron_tp.cut import cut_parameter
from kenotron_tp.matmul import How, matmul
from kenotron_tp.planned_modules import CutModule, become


class CutConv1D(CutModule):
    """Its part on a rank: (..., I) -> (..., O/t), or (..., I/t) -> (..., O)."""

    way: Literal["column", "row"]
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's features, or the sum over ranks and the bias."""
        how = How(self.axis, self.way, x.shape[:-1], False, False, False, None)
        return matmul(x, self.weight.t(), self.bias, how)


def is_conv1d(layer: nn.Module) -> bool:
    """Return True for transformers' ``Conv1D``, which this package does not import."""
    return type(layer).__name__ == "Conv1D" and type(getattr(layer, "nf", None)) is int


def cut_conv1d(layer: nn.Module, axis: Axis, chunks: Sequence[Chunk] | None) -> nn.Module:
    """Cut the output features as ``chunks`` say; None: the input features."""
    placements: Placements = {"weight": Shard(axis.name, 0)}
    if chunks is not None:
        pieces = tuple(chunks)
        placements = {"weight": Shard(axis.name, 1, pieces), "bias": Shard(axis.name, 0, pieces)}
    for name, shard in placements.items():
        whole = layer.get_parameter(name)
        assert isinstance(shard, Shard)
        part = cut_parameter(whole.detach().clone(), name, shard, axis)
        part.requires_grad = whole.requires_grad
        layer.register_parameter(name, part)
    way = "row" if chunks is None else "column"
    return become(layer, CutConv1D, axis, way=way, placements=placements)
