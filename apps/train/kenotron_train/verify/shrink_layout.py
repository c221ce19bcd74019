"""Fewer ranks and fewer layers that are cut in the same way."""

from __future__ import annotations

import math
from dataclasses import replace

from kenotron_config import ParallelismConfig

LEAST = 2
"""Ranks of an axis that is still one."""
DROPPED = ("dp", "cp", "pp", "tp")
"""Axes in the order in which they are dropped where two ranks each are too many: simplest first."""
MOST_LAYERS = 3
"""Decoder layers where no pipeline asks for more."""


def few(number: int, most: int) -> int:
    """``number``, or the largest one up to ``most`` that is as even or odd; 1 for 1 only."""
    if number <= most:
        return number
    return most if (number - most) % 2 == 0 else max(most - 1, 2)


def fewer_ranks(section: ParallelismConfig, ranks: int) -> ParallelismConfig:
    """The same kinds of axes on at most ``ranks`` processes.

    The largest axis is halved until all fit; two ranks are the least that an axis of several
    keeps. Where that is too many still, axes are dropped: dp, then cp, then pp.
    """
    sizes = {name: getattr(section, name) for name in DROPPED}

    while math.prod(sizes.values()) > ranks:
        largest = max(sizes, key=lambda name: sizes[name])
        if sizes[largest] > LEAST:
            sizes[largest] = max(LEAST, sizes[largest] // 2)
        else:
            sizes[next(name for name in DROPPED if sizes[name] > 1)] = 1
    ep = math.gcd(section.ep, math.prod(sizes.values()) // sizes["pp"])
    return replace(section, **sizes, ep=ep)


def small_shards(shard_ranks: int | None, dp: int, small_dp: int) -> int | None:
    """Return fewer ranks that own all slices: all of dp as before, some of them, or one.

    Args:
        shard_ranks: ``OptimizerConfig.shard_ranks``.
        dp: data ranks before.
        small_dp: data ranks after.
    """
    if shard_ranks is None or shard_ranks == dp:
        return shard_ranks and small_dp
    most = min(shard_ranks, max(small_dp // 2, 1))
    return next(ranks for ranks in range(most, 0, -1) if small_dp % ranks == 0)


def small_depth(depth: int, stages: int, small_stages: int, every: int | None) -> tuple[int, int]:
    """Fewer decoder layers, and every n-th of them that is special.

    Arguments: layers; stages that the pipeline cuts them in (ranks times chunks), before and
    after; every n-th layer is special (None: none). Whether stages divide the layers stays
    as it is where that can be.
    """
    if depth < stages:  # some stages have no decoder layer
        fewer = max(1, small_stages - (stages - depth))
        return fewer, every if every and fewer % every == 0 else fewer
    even = depth % stages == 0
    each = 2 if small_stages <= 4 and depth >= 2 * stages else 1
    least = small_stages * each if small_stages > 1 else min(depth, MOST_LAYERS)
    if not even:
        least = small_stages + 1
    wanted = [1] if every is None else [every] * (every <= 4) + [2, 3, 4]
    for period in wanted:
        for layers in range(least, 2 * least + 4 * small_stages + 1):
            if layers % period == 0 and (layers % small_stages == 0) == even:
                return layers, period
    period = wanted[0]
    return -(-least // period) * period, period


def small_accumulation(count: int, pp: int, small_pp: int) -> int:
    """Fewer micro-batches: as many as ranks of the pipeline, less, or more, as before."""
    if pp == 1 or small_pp == 1:
        return few(count, 3)
    if count < pp:
        return min(count, small_pp - 1)
    if count % pp == 0:
        return small_pp * min(count // pp, 2)
    return small_pp + 1
