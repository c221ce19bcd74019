"""Gradients that leave every backward as slices (ZeRO-2; Rajbhandari et al., arXiv 1910.02054).

A bucket has a buffer (d, width) only from its first gradient of a backward to the end of its
reduce-scatter. What stays is the sum of this rank's rows over all backwards: (width,). Sums start
in the order in which buckets are complete, which the graph of a backward decides. Ranks compare
that of their first step, and keep it also where a gradient does not come later.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_dist import Handle, sum_rows
from kenotron_optim.data_axes import DataAxes, sum_replicas
from kenotron_optim.partition import Bucket, Place, blocks

Key = tuple[int, int]
"""A backward, counted from 0, and a bucket."""
_IN_FLIGHT = 2
"""Sums that travel at once."""


@dataclass(eq=False)
class _Filling:
    """A bucket's gradients of one backward."""

    buffer: Tensor
    """(d, width)."""
    missing: set[str]
    """Parameters without a gradient so far."""


class SliceSums:
    """Sums of some buckets' slices. Most buffers are of the same memory again and again.

    Args:
        buckets: what is reduced together; all over more than one rank.
        owners: the parameters of this stage whose gradients are added for each logical name: one,
            or two that are tied, whose sum is the same in any order.
        dtypes: of the sums, by bucket.
        axes: over which each bucket is reduced: replicas in ``finish``, once.
        device: of the gradients.
        check: compares the order of the first step over ranks, and raises where it differs.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        owners: Mapping[str, Sequence[str]],
        dtypes: Sequence[torch.dtype],
        axes: Sequence[DataAxes],
        device: torch.device,
        check: Callable[[list[Key]], None],
    ) -> None:
        self._buckets, self._axes, self._device = list(buckets), list(axes), device
        self._check, self._owners = check, owners
        self.sums = [
            torch.zeros(bucket.width, dtype=dtype, device=device)
            for bucket, dtype in zip(buckets, dtypes, strict=True)
        ]
        """By bucket (width,): after ``finish`` this rank's sums over all ranks and backwards."""
        self._place = {
            span.name: (i, span) for i, bucket in enumerate(buckets) for span in bucket.spans
        }
        sizes = [b.ranks * sums.nbytes for b, sums in zip(buckets, self.sums, strict=True)]
        self._common = max((n for n in sizes if n <= 2 * statistics.median(sizes)), default=0)
        """Bytes of buffers that are kept. A few larger ones, of embeddings, have memory only while
        they are used."""
        self._free: list[Tensor] = []
        self._filling: dict[Key, _Filling] = {}
        self._flying: deque[tuple[int, Tensor, Handle]] = deque()
        self._orders: dict[int, list[Key]] = {}
        """Of all sums of a step, by its number of backwards."""
        self._begin(None)

    def __contains__(self, name: object) -> bool:
        """Return whether a logical tensor's gradient is added here."""
        return name in self._place

    def start(self, backwards: int | None, *, unfinished: bool) -> None:
        """Forget the last step's sums. Collective where that step is ``unfinished``.

        ``backwards``: how many follow, the same on all ranks; None: it is not known.
        """
        if unfinished:
            self._finish()
        self._begin(backwards)

    def _begin(self, backwards: int | None) -> None:
        self._backwards = backwards
        self._added = [0] * len(self._buckets)
        """Backwards whose rows have been added, by bucket."""
        self._started: list[Key] = []
        self._complete: set[Key] = set()

    def places(self, name: str, backward: int) -> tuple[list[Place], bool]:
        """Return where a tensor's gradient of a backward, counted from 0, belongs.

        Returns:
            Views of a buffer, and whether it is the first there: what they hold has no meaning.
        """
        i, span = self._place[name]
        filling = self._of(i, backward)
        return list(blocks(filling.buffer, span)), filling.missing.issuperset(self._owners[name])

    def arrived(self, name: str, path: str, backward: int) -> None:
        """Say that a parameter's was added. The last one of a bucket starts its sum."""
        i, _ = self._place[name]
        filling = self._of(i, backward)
        filling.missing.discard(path)
        if not filling.missing:
            self._completed((backward, i))

    def finish(self) -> None:
        """Complete all sums. Collective over the axes of all buckets.

        Raises ValueError where the first step had another order on another rank.
        """
        self._finish()
        if self._buckets and self._backwards and self._backwards not in self._orders:
            self._check(self._started)
            self._orders[self._backwards] = self._started
        pairs = zip(self.sums, self._axes, strict=True)
        for handle in [sum_replicas(sums, axes) for sums, axes in pairs]:
            handle.wait()
        for sums, added in zip(self.sums, self._added, strict=True):
            if not added:
                sums.zero_()

    def _completed(self, key: Key) -> None:
        """Start a sum, or wait with it for those before it."""
        order = self._orders.get(self._backwards or 0)
        if order is None:
            return self._start(key)
        self._complete.add(key)
        while (n := len(self._started)) < len(order) and order[n] in self._complete:
            self._start(order[n])

    def _finish(self) -> None:
        """Start what is left, with zeros for gradients that did not come, and wait."""
        if self._backwards is None:
            left = sorted(self._filling)
        elif (order := self._orders.get(self._backwards)) is not None:
            left = order[len(self._started) :]
        else:
            keys = {(b, i) for b in range(self._backwards) for i in range(len(self._buckets))}
            left = sorted(keys.difference(self._started))
        for backward, i in left:
            for span in self._buckets[i].spans:
                places, empty = self.places(span.name, backward)
                for view, _ in places if empty else ():
                    view.zero_()
            self._start((backward, i))
        while self._flying:
            self._land()

    def owned(self, name: str) -> Tensor:
        """Return what this rank owns of a tensor's sum (n,), a view."""
        i, span = self._place[name]
        start, stop = span.owned(self._axes[i].slices.rank)
        return self.sums[i][span.offset : span.offset + stop - start]

    def _of(self, i: int, backward: int) -> _Filling:
        if (backward, i) not in self._filling:
            paths = {path for span in self._buckets[i].spans for path in self._owners[span.name]}
            self._filling[backward, i] = _Filling(self._buffer(i), paths)
        return self._filling[backward, i]

    def _buffer(self, i: int) -> Tensor:
        bucket, dtype = self._buckets[i], self.sums[i].dtype
        nbytes = bucket.ranks * self.sums[i].nbytes
        if self._free and nbytes <= self._common:
            memory = self._free.pop()
        else:
            size = max(nbytes, self._common)
            memory = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return memory[:nbytes].view(dtype).view(bucket.ranks, bucket.width)

    def _start(self, key: Key) -> None:
        if len(self._flying) == _IN_FLIGHT:
            self._land()
        self._started.append(key)
        buffer, (_, i) = self._filling.pop(key).buffer, key
        self._flying.append((i, buffer, sum_rows(buffer, self._axes[i].slices)))

    @torch.no_grad()
    def _land(self) -> None:
        """Add the oldest sum that is under way, and give its buffer back."""
        i, buffer, handle = self._flying.popleft()
        handle.wait()
        row = buffer[self._axes[i].slices.rank]
        # A first one is copied: 0 + -0 is another number of the same value.
        self.sums[i].add_(row) if self._added[i] else self.sums[i].copy_(row)
        self._added[i] += 1
        memory = buffer.untyped_storage()
        if memory.nbytes() == self._common:
            whole = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._free.append(whole.set_(memory))
