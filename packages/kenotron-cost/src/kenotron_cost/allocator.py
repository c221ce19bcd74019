"""Memory that torch's caching allocator of a GPU takes for blocks of known sizes.

Its rules are those of ``c10/core/AllocatorConfig.h`` and ``c10/cuda/CUDACachingAllocator.cpp`` of
torch 2.13 without PYTORCH_CUDA_ALLOC_CONF. What is freed and taken again in another order leaves
gaps that no rule foretells: that is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

MIB = 2**20
BLOCK = 512
"""Every size is rounded up to a multiple of it."""
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
"""Blocks of so many bytes or fewer share segments of the device's memory of the second size."""
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB
"""Blocks of fewer bytes, but no small ones, share segments of the second size."""
ROUND_LARGE = 2 * MIB
"""Each other block is a segment of a multiple of it."""


def rounding(blocks: Mapping[int, int]) -> int:
    """Return the bytes of the segments of some blocks beyond those that were asked for.

    Args:
        blocks: how many there are, by their bytes.
    """
    return taken_bytes(blocks) - sum(size * count for size, count in blocks.items())


def taken_bytes(blocks: Mapping[int, int]) -> int:
    """Return the bytes of the segments that some blocks lie in; see ``rounding``."""
    rounded = Counter[int]()
    for size, count in blocks.items():
        rounded[_up(size, BLOCK)] += count
    small = sum(size * count for size, count in rounded.items() if size <= SMALL)
    large = sum(_up(size, ROUND_LARGE) * n for size, n in rounded.items() if size >= LARGE)
    middle = {size: count for size, count in rounded.items() if SMALL < size < LARGE}
    return _up(small, SMALL_SEGMENT) + large + _shared_segments(middle) * LARGE_SEGMENT


def _shared_segments(blocks: Mapping[int, int]) -> int:
    """Return the segments of blocks of middle size, the largest ones first, each in the fullest
    segment that has room for it."""
    segments, free = 0, Counter[int]()
    for size, count in sorted(blocks.items(), reverse=True):
        places = [room for room in sorted(free) if room >= size]
        for room in (*places, LARGE_SEGMENT):
            each = room // size
            used = -(-count // each)
            if room == LARGE_SEGMENT:
                segments += used
            else:
                used = min(used, free[room])
                free[room] -= used
            whole, part = divmod(min(count, used * each), each)
            free[room - each * size] += whole
            if part:
                free[room - part * size] += 1
            count -= min(count, used * each)
    return segments


def _up(size: int, unit: int) -> int:
    """Return a size rounded up to a multiple."""
    return -(-size // unit) * unit
