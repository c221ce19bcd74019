"""Linear layers cut over the tp axis (Megatron-LM, arXiv 1909.08053; 2205.05198).

Shapes: I input features, O output features, T flattened tokens; ``/t`` is divided by tp size, and
O/t means this rank's part of every chunk.

With ``sequence_parallel`` the tokens between two layers are cut along dim 0, n = T/t rows (rounded
up) on each rank: a column layer gathers them, a row layer sums and scatters them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from kenotron_dist import Axis, Roles, WeightQueue
from kenotron_dist.placement import Chunk, Partial, Placements, Shard
from kenotron_tp.cut import check_axis, cut_parameter, take_parts
from kenotron_tp.matmul import How, matmul
from kenotron_tp.sequence import call_mode, check_tokens, rows_of_rank, whole_tokens


class ColumnParallelLinear(nn.Module):
    """``y = x W^T + b``, W (O, I) cut along O: every rank computes its own output features.

    Args:
        in_features: I.
        out_features: O, whole.
        axis: the tp axis; size 1 makes this an ``nn.Linear``.
        bias: add a learned bias, cut like the output.
        sequence_parallel: the input is (n, ..., I) and is gathered; else it is (..., I), whole.
        overlap: hide communication behind products: under sequence parallelism the gather behind
            the product of the own tokens, else the input gradient's all-reduce behind the weight's.
        regather: under sequence parallelism keep only the own tokens for backward and gather once
            more there: 1/t of the memory for one all-gather.
        chunks: pieces that O is a concatenation of (q, k, v; gate, up), each cut by itself, with
            fewer ``parts`` than ranks replicated and ``pad`` features of no meaning.
        device, dtype: of the parameters. Off meta they start as ``nn.Linear``'s would after the
            same calls on one process: with the same seed on all ranks.

    Raises:
        ValueError: a size does not divide.
    """

    defers_weight_grad = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        overlap: bool = False,
        regather: bool = False,
        chunks: Sequence[Chunk] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_axis(axis)
        pieces = tuple(chunks) if chunks is not None else (Chunk(out_features),)
        if sum(chunk.size for chunk in pieces) != out_features:
            raise ValueError(
                f"chunks {[chunk.size for chunk in pieces]} do not add up to out_features "
                f"{out_features}: give the sizes of all its pieces, without their padding"
            )
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.overlap, self.regather = overlap, regather
        self.weight_queue: WeightQueue | None = None
        rows = Shard(axis.name, 0, pieces)
        whole = _linear_values(in_features, out_features, bias, device, dtype)
        self.weight = cut_parameter(whole[0], "weight", rows, axis)  # (O/t, I)
        self.bias = (
            None if whole[1] is None else cut_parameter(whole[1], "bias", rows, axis)
        )  # (O/t,)
        self.placements: Placements = {"weight": rows}
        self.roles: Roles = {"weight": "hidden"}
        if bias:
            self.placements["bias"] = rows

    @classmethod
    def from_linear(cls, linear: nn.Linear, axis: Axis, **options: Any) -> Self:
        """A column layer with this rank's part of a whole layer's weights, which are copied.

        ``options``: ``sequence_parallel``, ``overlap``, ``regather``, ``chunks``. All ranks give
        the same layer. Raises ValueError when a size does not divide.
        """
        made = cls(**_sizes_of(linear), axis=axis, **options)
        return take_parts(made, linear, axis, made.placements)

    def forward(
        self, x: Tensor, *, tokens: int | None = None, sequence_parallel: bool | None = None
    ) -> Tensor:
        """(..., I), or (n, ..., I) under sequence parallelism -> (..., O/t), all tokens.

        Communication: one all-reduce in backward; under sequence parallelism an all-gather in
        forward (with ``regather`` also in backward) and a reduce-scatter in backward.

        Args:
            x: (..., I), or (n, ..., I).
            tokens: T under sequence parallelism, where the ranks do not divide it.
            sequence_parallel: another mode than the layer's, for inference.

        Raises:
            ValueError: T does not fit n, or the mode is changed while gradients are recorded.
        """
        sequence = call_mode(self, self.sequence_parallel, sequence_parallel)
        _check_features(x, self.weight.shape[1], "the in_features of this layer")
        lead = x.shape[:-1]
        if sequence:
            check_tokens(x)
            lead = (whole_tokens(x, self.axis, tokens), *lead[1:])
        mode = sequence, self.overlap, self.regather
        how = How(self.axis, "column", lead, *mode, self.weight_queue)
        return matmul(x, self.weight, self.bias, how)

    def extra_repr(self) -> str:
        """Local sizes and mode."""
        return _described(self, f", regather={self.regather}")


class RowParallelLinear(nn.Module):
    """``y = x W^T + b``, W (O, I) cut along I: every rank has its own input features.

    Args:
        in_features: I, whole; the input holds this rank's I/t.
        out_features: O.
        axis: the tp axis; size 1 makes this an ``nn.Linear``.
        bias: add a learned bias, whole on every rank and added once, after the sum.
        sequence_parallel: the output is this rank's tokens (n, ..., O); else it is (..., O), whole.
        overlap: under sequence parallelism communication is hidden behind products, piece by piece;
            without it there is nothing to hide a row layer's all-reduce behind.
        device, dtype: as in ``ColumnParallelLinear``.

    Raises:
        ValueError: a size does not divide.
    """

    defers_weight_grad = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        bias: bool = False,
        sequence_parallel: bool = False,
        overlap: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_axis(axis)
        self.axis, self.sequence_parallel, self.overlap = axis, sequence_parallel, overlap
        self.weight_queue: WeightQueue | None = None
        columns = Shard(axis.name, 1)
        weight, values = _linear_values(in_features, out_features, bias, device, dtype)
        self.weight = cut_parameter(weight, "weight", columns, axis)  # (O, I/t)
        self.bias = None if values is None else nn.Parameter(values)  # (O,)
        self.placements: Placements = {"weight": columns}
        self.roles: Roles = {"weight": "hidden"}
        if bias and sequence_parallel:
            self.placements["bias"] = Partial(axis.name)  # each rank sees its own tokens

    @classmethod
    def from_linear(cls, linear: nn.Linear, axis: Axis, **options: Any) -> Self:
        """A row layer with this rank's part of a whole layer's weights, which are copied.

        ``options``: ``sequence_parallel``, ``overlap``. All ranks give the same layer. Raises
        ValueError when a size does not divide.
        """
        made = cls(**_sizes_of(linear), axis=axis, **options)
        return take_parts(made, linear, axis, made.placements)

    def forward(self, x: Tensor, *, sequence_parallel: bool | None = None) -> Tensor:
        """(..., I/t) -> (..., O), or (T, ..., I/t) -> (n, ..., O) under sequence parallelism.

        Rows beyond T are the bias, or zero. ``sequence_parallel``: another mode than the layer's,
        for inference. One all-reduce in forward; under sequence parallelism a reduce-scatter in
        forward and an all-gather in backward. Raises ValueError when the mode is changed while
        gradients are recorded.
        """
        sequence = call_mode(self, self.sequence_parallel, sequence_parallel)
        _check_features(x, self.weight.shape[1], "this rank's part of the in_features")
        lead = x.shape[:-1]
        if sequence:
            check_tokens(x)
            lead = (rows_of_rank(lead[0], self.axis), *lead[1:])
        how = How(self.axis, "row", lead, sequence, self.overlap, False, self.weight_queue)
        return matmul(x, self.weight, self.bias, how)

    def extra_repr(self) -> str:
        """Local sizes and mode."""
        return _described(self)


def _sizes_of(linear: nn.Linear) -> dict[str, Any]:
    return {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "device": "meta",
        "dtype": linear.weight.dtype,
    }


def _described(layer: ColumnParallelLinear | RowParallelLinear, more: str = "") -> str:
    (out, features), axis = layer.weight.shape, layer.axis
    return (
        f"{features} -> {out} on rank {axis.rank} of {axis.size} along {axis.name}, "
        f"bias={layer.bias is not None}, sequence_parallel={layer.sequence_parallel}, "
        f"overlap={layer.overlap}{more}"
    )


def _check_features(x: Tensor, features: int, whose: str) -> None:
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(
            f"x {tuple(x.shape)} needs {features} features along its last dim, {whose}"
        )


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
