"""Gradients of all data ranks on each of them (ZeRO stage 0)."""

from __future__ import annotations

import torch
from torch import Tensor

from kenotron_dist import gather_rows
from kenotron_optim.accumulate import GradAccumulator, Slices
from kenotron_optim.torch_groups import Piece


def gather_gradients(accumulator: GradAccumulator, slices: Slices) -> dict[Piece, Tensor]:
    """Return every data rank's flat slices, gathered where they were added up.

    Args:
        accumulator: has the buffers, which it keeps whole.
        slices: this rank's, of ``accumulator.finish``. Collective over the data axes.
    """
    found: dict[Piece, Tensor] = {}
    handles = []
    for bucket, rows in zip(accumulator.buckets, accumulator.buffers, strict=True):
        axis = accumulator.axis_of(bucket.spans[0].name)
        if rows.dtype != torch.float32:
            rows = bucket.buffer(torch.float32, rows.device)
        for span in bucket.spans:
            slice_ = slices[span.name]
            place = rows[axis.rank, span.offset : span.offset + slice_.numel()]
            if place.data_ptr() != slice_.data_ptr():
                place.copy_(slice_)
            for rank in range(axis.size):
                start, stop = span.owned(rank)
                found[span.name, rank] = rows[rank, span.offset : span.offset + stop - start]
        handles.append(gather_rows(rows, axis))
    for handle in handles:
        handle.wait()
    return found
