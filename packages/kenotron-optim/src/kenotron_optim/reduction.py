"""Sums of gradient buckets over the ranks that share them, started in one order on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from kenotron_dist import Axis, Handle
from kenotron_optim.data_axes import DataAxes, sum_slices

_IN_FLIGHT = 2
"""Sums that travel at once on gloo: while one is added up, the next one arrives. Others need no
memory to arrive in, and waiting for one would make an accelerator's computation wait, too."""


class Reduction:
    """Reduces buffers to this rank's rows, in place.

    A bucket starts when it is ready and all before it have started: ranks agree on the order,
    whatever the order in which their gradients come.

    Args:
        buffers: (d, width) each, in the order in which they are expected to be ready.
        axes: over which each is summed.
        early: number of the first that may start before ``finish``.
    """

    def __init__(self, buffers: Sequence[Tensor], axes: Sequence[DataAxes], early: int) -> None:
        self._buffers, self._axes = buffers, axes
        self._early = early if any(axis.slices.size > 1 or axis.replicas for axis in axes) else 0
        arriving = (b.nbytes // len(b) * (len(b) - 1) for b in buffers)
        self._largest = max(arriving, default=0)
        """Bytes that arrive for the largest buffer."""
        self._rooms = [torch.empty(0)] * _IN_FLIGHT
        self.start()

    def start(self) -> None:
        """Forget the last step."""
        self._ready = [False] * len(self._buffers)
        self._started = 0
        self._flying: deque[Handle] = deque()

    def ready(self, bucket: int) -> None:
        """All gradients of a bucket are there."""
        self._ready[bucket] = True
        while self._started < self._early and self._ready[self._started]:
            self._start_next()

    def start_early(self) -> None:
        """Start the rest of those that may start early, ready or not: in one order on all ranks."""
        while self._started < self._early:
            self._start_next()

    def finish(self) -> None:
        """Start what is left and wait: then this rank's row of each buffer is summed."""
        while self._started < len(self._buffers):
            self._start_next()
        for handle in self._flying:
            handle.wait()
        self._flying.clear()

    def _start_next(self) -> None:
        buffer, axis = self._buffers[self._started], self._axes[self._started]
        if axis.slices.backend == "gloo" and len(self._flying) == _IN_FLIGHT:
            self._flying.popleft().wait()
        self._flying.append(sum_slices(buffer, axis, self._room(buffer, axis.slices)))
        self._started += 1

    def _room(self, buffer: Tensor, axis: Axis) -> Tensor | None:
        """Return the memory in which others' rows arrive: the same for every second bucket."""
        if axis.backend != "gloo" or axis.size == 1:
            return None
        shape = (axis.size - 1, buffer.shape[1])
        nbytes = shape[0] * shape[1] * buffer.element_size()
        place = self._started % _IN_FLIGHT
        if self._rooms[place].numel() < nbytes:
            self._rooms[place] = torch.empty(self._largest, dtype=torch.uint8)
        return self._rooms[place][:nbytes].view(buffer.dtype).view(shape)
