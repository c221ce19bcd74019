"""Linear layers cut over the tp axis (Megatron-LM, arXiv 1909.08053; 2205.05198).

Shapes: I input features, O output features, T flattened tokens; ``/t`` is divided by tp size, and
O/t means this rank's part of every chunk.

With ``sequence_parallel`` the tokens between two layers are cut along dim 0, (T/t, D): a column
layer gathers them, a row layer sums and scatters them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis, Chunk, Partial, Placements, Shard, TensorLayout, local_shape
from kenotron_dist.autograd import all_gather_from, copy_to, reduce_from, reduce_scatter_to
from kenotron_dist.boxes import scatter


class ColumnParallelLinear(nn.Module):
    """``y = x W^T + b``, W (O, I) cut along O: every rank computes its own output features.

    Arguments:
        in_features: I.
        out_features: O, whole.
        axis: the tp axis; size 1 makes this an ``nn.Linear``.
        bias: add a learned bias, cut like the output.
        sequence_parallel: the input is (T/t, I) and is gathered; else it is (..., I), whole.
        chunks: pieces that O is a concatenation of (q, k, v; gate, up), each cut by itself, with
            fewer ``parts`` than ranks replicated and ``pad`` features of no meaning.
        device, dtype: of the parameters. Off meta they start as ``nn.Linear``'s would after the
            same calls on one process: seed torch alike on all ranks.

    ``forward``: (..., I) -> (..., O/t). One all-reduce (or reduce-scatter) in backward.
    Raises ValueError when a size does not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        chunks: Sequence[Chunk] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        pieces = tuple(chunks) if chunks is not None else (Chunk(out_features),)
        if sum(chunk.size for chunk in pieces) != out_features:
            raise ValueError(
                f"chunks {[chunk.size for chunk in pieces]} do not add up to out_features "
                f"{out_features}"
            )
        self.axis, self.sequence_parallel = axis, sequence_parallel
        rows = Shard(axis.name, 0, pieces)
        whole = _linear_values(in_features, out_features, bias, device, dtype)
        self.weight = _cut(whole[0], "weight", rows, axis)  # (O/t, I)
        self.bias = None if whole[1] is None else _cut(whole[1], "bias", rows, axis)  # (O/t,)
        self.placements: Placements = {"weight": rows}
        if bias:
            self.placements["bias"] = rows

    def forward(self, x: Tensor) -> Tensor:
        """(..., I), or (T/t, I) under sequence parallelism -> (..., O/t)."""
        x = all_gather_from(x, self.axis) if self.sequence_parallel else copy_to(x, self.axis)
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """``y = x W^T + b``, W (O, I) cut along I: every rank has its own input features.

    Arguments:
        in_features: I, whole; the input holds this rank's I/t.
        out_features: O.
        axis: the tp axis; size 1 makes this an ``nn.Linear``.
        bias: add a learned bias, whole on every rank and added once, after the sum.
        sequence_parallel: the output is this rank's tokens (T/t, O); else it is (..., O), whole.
        device, dtype: as in ``ColumnParallelLinear``.

    ``forward``: (..., I/t) -> (..., O). One all-reduce (or reduce-scatter) in forward.
    Raises ValueError when a size does not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        columns = Shard(axis.name, 1)
        whole = _linear_values(in_features, out_features, bias, device, dtype)
        self.weight = _cut(whole[0], "weight", columns, axis)  # (O, I/t)
        self.bias = None if whole[1] is None else nn.Parameter(whole[1])  # (O,)
        self.placements: Placements = {"weight": columns}
        if bias and sequence_parallel:
            self.placements["bias"] = Partial(axis.name)  # each rank sees its own tokens

    def forward(self, x: Tensor) -> Tensor:
        """(..., I/t) -> (..., O), or (T/t, O) under sequence parallelism."""
        y = F.linear(x, self.weight)
        y = reduce_scatter_to(y, self.axis) if self.sequence_parallel else reduce_from(y, self.axis)
        return y if self.bias is None else y + self.bias


def _linear_values(
    in_features: int,
    out_features: int,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Whole weight and bias as ``nn.Linear`` draws them, from torch's global generator."""
    bound = 1 / math.sqrt(in_features) if in_features else 0.0
    weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
    values = torch.empty(out_features, device=device, dtype=dtype) if bias else None
    if not weight.is_meta:
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if values is not None:
            nn.init.uniform_(values, -bound, bound)
    return weight, values


def _cut(whole: Tensor, name: str, shard: Shard, axis: Axis) -> nn.Parameter:
    """This rank's part as a parameter."""
    layout = TensorLayout(name, tuple(whole.shape), (shard,))
    sizes, coords = {axis.name: axis.size}, {axis.name: axis.rank}
    if whole.is_meta:
        return nn.Parameter(whole.new_empty(local_shape(layout, sizes)))
    return nn.Parameter(scatter(whole, layout, sizes, coords))
