"""The memory of a stage's gradients: whole buffers, or slices that outlive a backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from kenotron_dist import Axis, Mesh
from kenotron_optim.checks import check_order
from kenotron_optim.config import Reduce
from kenotron_optim.data_axes import data_axes
from kenotron_optim.partition import Bucket, Span
from kenotron_optim.reduction import Reduction
from kenotron_optim.slice_sums import SliceSums


@dataclass(frozen=True)
class GradientBuffers:
    """Buffers of buckets, and who reduces them."""

    buffers: list[Tensor]
    """(d, width) by bucket; on meta where only slices are kept."""
    places: dict[str, tuple[Tensor, Span]]
    """Buffer and place in it, by logical name."""
    sums: SliceSums
    """Of the buckets of which only slices are kept."""
    reduction: Reduction
    """Of the others."""
    number: dict[str, int]
    """Number of a tensor's bucket in ``reduction``."""


def make_buffers(
    buckets: Sequence[Bucket],
    owners: Mapping[str, Sequence[str]],
    mesh: Mesh,
    late: Collection[str],
    reduce: Reduce,
    peers: Axis,
    *,
    fp32: bool,
    shard_ranks: int | None = None,
) -> GradientBuffers:
    """Return zero buffers.

    Args:
        buckets: what is reduced together, in the order in which it is ready.
        owners: parameters of this stage by logical name.
        mesh: the mesh.
        late: logical names whose sums start when a step is over: their buckets are kept whole.
        reduce: whether the others are.
        peers: ranks that must add gradients in the same order.
        fp32: buffers in fp32, else in the dtype of their parameters.
        shard_ranks: see ``data_axes``.
    """
    axes = [data_axes(mesh, bucket.axes, shard_ranks) for bucket in buckets]
    early = [not any(span.name in late for span in bucket.spans) for bucket in buckets]
    leaves = [
        reduce == "micro_batch" and is_early and axis.slices.size > 1
        for is_early, axis in zip(early, axes, strict=True)
    ]
    stays = [not slices for slices in leaves]
    device, meta = mesh.device, torch.device("meta")
    buffers = [
        bucket.buffer(torch.float32 if fp32 else bucket.dtype, meta if slices else device)
        for bucket, slices in zip(buckets, leaves, strict=True)
    ]
    sums = SliceSums(
        list(compress(buckets, leaves)),
        owners,
        [buffer.dtype for buffer in compress(buffers, leaves)],
        list(compress(axes, leaves)),
        device,
        partial(check_order, peers, list(compress(buckets, leaves))),
    )
    whole = list(compress(buffers, stays)), list(compress(axes, stays))
    return GradientBuffers(
        buffers=buffers,
        places={
            span.name: (buffer, span)
            for bucket, buffer in zip(buckets, buffers, strict=True)
            for span in bucket.spans
        },
        sums=sums,
        reduction=Reduction(*whole, sum(compress(early, stays))),
        number={s.name: i for i, b in enumerate(compress(buckets, stays)) for s in b.spans},
    )
