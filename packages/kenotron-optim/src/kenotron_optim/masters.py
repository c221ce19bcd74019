"""fp32 masters: what an optimizer updates, slices of parameters that a rank owns."""

from __future__ import annotations

import torch
from torch import Tensor

from kenotron_optim.accumulate import GradAccumulator
from kenotron_optim.partition import Span
from kenotron_optim.torch_groups import Piece
from kenotron_optim.zero_stage import ZeroStage


def make_masters(accumulator: GradAccumulator, stage: ZeroStage) -> dict[Piece, Tensor]:
    """Return the masters of a rank, by (logical name, data rank): flat leaves, in fp32.

    Args:
        accumulator: has the parameters and their buckets.
        stage: of ZeRO. 0: those of all data ranks. Up to 2 the master of an fp32 parameter is the
            parameter's own memory. 3: memory of its own; zeros where the parameter has none, which
            ``SlicedOptimizer.overlap_forward`` fills.

    Raises:
        ValueError: there is no such stage, or it needs gradients that the accumulator has not.
    """
    return {
        piece: master_of(accumulator, span, piece[1], stage)
        for _, piece, span in pieces_of(accumulator, stage)
    }


def pieces_of(accumulator: GradAccumulator, stage: ZeroStage) -> list[tuple[int, Piece, Span]]:
    """Return the pieces that a rank has masters of, with the number of their bucket, in its order.

    Raises as ``make_masters``.
    """
    if not stage.cuts_states and accumulator.slice_sums:
        raise ValueError(
            "ZeRO stage 0 gathers gradients, of which the accumulator keeps slices alone: make "
            "it with reduce='step', or choose another stage"
        )
    return [
        (number, (span.name, rank), span)
        for number, bucket in enumerate(accumulator.buckets)
        for span in bucket.spans
        for axis in [accumulator.axis_of(span.name)]
        for rank in stage.owners(axis.rank, axis.size)
        if span.owned(rank)[0] < span.owned(rank)[1]
    ]


def master_of(accumulator: GradAccumulator, span: Span, rank: int, stage: ZeroStage) -> Tensor:
    """The master (n,), in fp32, of what a rank owns of a parameter."""
    # With stage 3 the parameter's memory goes, and the master stays.
    own = accumulator.range_of(span, rank)
    return own.to(torch.float32, copy=stage.cuts_parameters).requires_grad_()
