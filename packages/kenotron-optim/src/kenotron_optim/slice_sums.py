"""Gradients that leave every backward as slices (ZeRO-2; Rajbhandari et al., arXiv 1910.02054).

A bucket has a buffer (d, width) only from its first gradient of a backward to the end of its
reduce-scatter. What stays is the sum of this rank's rows over all backwards: (width,). Ranks begin
in the order in which buckets are complete, which the graph of a backward decides, the same on all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_dist import Axis, Handle, sum_rows
from kenotron_optim.partition import Bucket, Place, blocks

_IN_FLIGHT = 2
"""Sums that travel at once."""


@dataclass(eq=False)
class _Filling:
    """A bucket's gradients of one backward."""

    buffer: Tensor
    """(d, width)."""
    missing: set[str]
    """Logical names without a gradient so far."""


class SliceSums:
    """Sums of some buckets' slices. Buffers are of the same memory again and again.

    Args:
        buckets: what is reduced together; all over more than one rank.
        dtypes: of the sums, by bucket.
        axes: over which each bucket is reduced.
        device: of the gradients.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dtypes: Sequence[torch.dtype],
        axes: Sequence[Axis],
        device: torch.device,
    ) -> None:
        self._buckets, self._axes, self._device = list(buckets), list(axes), device
        self.sums = [
            torch.zeros(bucket.width, dtype=dtype, device=device)
            for bucket, dtype in zip(buckets, dtypes, strict=True)
        ]
        """By bucket (width,): after ``finish`` this rank's sums over all ranks and backwards."""
        self._place = {
            span.name: (i, span) for i, bucket in enumerate(buckets) for span in bucket.spans
        }
        sizes = zip(buckets, self.sums, strict=True)
        self._largest = max((b.ranks * sums.nbytes for b, sums in sizes), default=0)
        self._free: list[Tensor] = []
        self._filling: dict[tuple[int, int], _Filling] = {}
        self._flying: deque[tuple[int, Tensor, Handle]] = deque()
        self._added = [0] * len(self._buckets)
        """Backwards whose rows have been added, by bucket."""

    def __contains__(self, name: object) -> bool:
        """Whether a logical tensor's gradient is added here."""
        return name in self._place

    def start(self) -> None:
        """Forget the last step's sums. Collective where some are under way."""
        self.finish()
        self._added = [0] * len(self._buckets)

    def places(self, name: str, backward: int) -> list[Place]:
        """Return where a tensor's gradient of a backward, counted from 0, is to be written."""
        i, span = self._place[name]
        return list(blocks(self._of(i, backward).buffer, span))

    def arrived(self, name: str, backward: int) -> None:
        """Say that it was written. The last one of a bucket starts its sum."""
        i, _ = self._place[name]
        filling = self._of(i, backward)
        filling.missing.discard(name)
        if not filling.missing:
            self._start(i, backward)

    def finish(self) -> None:
        """Complete all sums. Collective over the axes of all buckets that got a gradient."""
        for backward, i in sorted((backward, i) for i, backward in self._filling):
            filling = self._filling[i, backward]
            for name in filling.missing:
                for view, _ in self.places(name, backward):
                    view.zero_()
            self._start(i, backward)
        while self._flying:
            self._land()
        for sums, added in zip(self.sums, self._added, strict=True):
            if not added:
                sums.zero_()

    def owned(self, name: str) -> Tensor:
        """Return what this rank owns of a tensor's sum (n,), a view."""
        i, span = self._place[name]
        start, stop = span.owned(self._axes[i].rank)
        return self.sums[i][span.offset : span.offset + stop - start]

    def _of(self, i: int, backward: int) -> _Filling:
        if (i, backward) not in self._filling:
            names = {span.name for span in self._buckets[i].spans}
            self._filling[i, backward] = _Filling(self._buffer(i), names)
        return self._filling[i, backward]

    def _buffer(self, i: int) -> Tensor:
        if not self._free:
            memory = torch.zeros(self._largest, dtype=torch.uint8, device=self._device)
            self._free.append(memory)
        bucket, dtype = self._buckets[i], self.sums[i].dtype
        nbytes = bucket.ranks * self.sums[i].nbytes
        return self._free.pop()[:nbytes].view(dtype).view(bucket.ranks, bucket.width)

    def _start(self, i: int, backward: int) -> None:
        if len(self._flying) == _IN_FLIGHT:
            self._land()
        buffer = self._filling.pop((i, backward)).buffer
        self._flying.append((i, buffer, sum_rows(buffer, self._axes[i])))

    @torch.no_grad()
    def _land(self) -> None:
        """Add the oldest sum that is under way, and give its buffer back."""
        i, buffer, handle = self._flying.popleft()
        handle.wait()
        row = buffer[self._axes[i].rank]
        # A first one is copied: 0 + -0 is another number of the same value.
        self.sums[i].add_(row) if self._added[i] else self.sums[i].copy_(row)
        self._added[i] += 1
        whole = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._free.append(whole.set_(buffer.untyped_storage()))
