"""Ranges of a flattened tensor as rectangular blocks of it: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator

Shape = tuple[int, ...]
"""Sizes, or indices, along the dimensions of a tensor."""


def flat_blocks(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a range of a flattened tensor in (first index, shape) blocks: at most 2n - 1 for n dims.

    Blocks come in the order of their elements; what lies beyond the last element is left out.
    """
    stop = min(stop, math.prod(shape))
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, start // row, start % row, stop - start // row * row)
        return
    if start % row:
        yield from _in_row(shape, first - 1, start % row, row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if stop % row:
        yield from _in_row(shape, last, 0, stop % row)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    for index, extent in flat_blocks(shape[1:], start, stop):
        yield (row, *index), (1, *extent)
