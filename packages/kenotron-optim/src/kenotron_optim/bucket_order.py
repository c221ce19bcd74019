"""The buckets of a stage's gradients, in the order in which their sums start on all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout
from kenotron_optim.data_axes import data_axes
from kenotron_optim.partition import Bucket, make_buckets


def order_buckets(
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, TensorLayout],
    mesh: Mesh,
    late: Collection[str],
    cap_mb: float | None,
    shard_ranks: int | None = None,
) -> list[Bucket]:
    """Return buckets of tensors that are reduced over the same axes, by when they are ready.

    Args:
        tensors: this stage's parameters, of any shape, by logical name, in the backward's order.
        layouts: by logical name; the grid of a tensor has the axes over which it is reduced.
        mesh: the mesh.
        late: names of tensors whose sums cannot start during the backward; they come last.
        cap_mb: MiB of a bucket. None: see ``make_buckets``.
        shard_ranks: see ``data_axes``.
    """
    cap_bytes = None if cap_mb is None else cap_mb * 2**20
    place = {name: i for i, name in enumerate(tensors)}
    buckets: list[Bucket] = []
    for is_late in (False, True):
        by_axes: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if (name in late) is is_late:
                by_axes.setdefault(mesh.view(layouts[name]).data, {})[name] = tensor
        runs = [
            make_buckets(own, data_axes(mesh, axes, shard_ranks).slices.size, cap_bytes, axes)
            for axes, own in by_axes.items()
        ]
        buckets += _merged(runs, place)
    return buckets


def _merged(runs: Sequence[Sequence[Bucket]], place: Mapping[str, int]) -> list[Bucket]:
    """Merge lists of buckets by when each is ready, without a change of order within a list.

    A bucket is ready with the last of its tensors, and not before those that precede it in its
    list.
    """
    keyed = []
    for run in runs:
        ready = accumulate((max(place[span.name] for span in b.spans) for b in run), max)
        keyed.append(list(zip(ready, run, strict=True)))
    return [bucket for _, bucket in heapq.merge(*keyed, key=lambda each: each[0])]
