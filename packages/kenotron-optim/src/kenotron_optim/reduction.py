"""Sums of gradient buckets over data-parallel ranks, started in one order on all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from kenotron_dist import Axis, Handle, sum_rows

_IN_FLIGHT = 2
"""Sums that travel at once: while one is added up, the next one arrives."""


class Reduction:
    """Reduces buffers (d, width) to this rank's rows, in place.

    Arguments: the buffers in the order in which they are expected to be ready; the data-parallel
    axis; how many of the first may start before ``finish``.

    A bucket starts when it is ready and all before it have started: ranks agree on the order,
    whatever the order in which their gradients come.
    """

    def __init__(self, buffers: Sequence[Tensor], axis: Axis, early: int) -> None:
        self._buffers, self._axis = buffers, axis
        self._early = early if axis.size > 1 else 0
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

    def finish(self) -> list[Tensor]:
        """This rank's rows, summed."""
        while self._started < len(self._buffers):
            self._start_next()
        for handle in self._flying:
            handle.wait()
        self._flying.clear()
        return [buffer[self._axis.rank] for buffer in self._buffers]

    def _start_next(self) -> None:
        if len(self._flying) == _IN_FLIGHT:
            self._flying.popleft().wait()
        buffer = self._buffers[self._started]
        self._flying.append(sum_rows(buffer, self._axis, self._room(buffer)))
        self._started += 1

    def _room(self, buffer: Tensor) -> Tensor | None:
        """Where others' rows arrive: the same memory for every second bucket."""
        if self._axis.backend != "gloo" or self._axis.size == 1:
            return None
        shape = (self._axis.size - 1, buffer.shape[1])
        nbytes = shape[0] * shape[1] * buffer.element_size()
        place = self._started % _IN_FLIGHT
        if self._rooms[place].numel() < nbytes:
            largest = max(b.nbytes for b in self._buffers) * (self._axis.size - 1)
            self._rooms[place] = torch.empty(largest // self._axis.size, dtype=torch.uint8)
        return self._rooms[place][:nbytes].view(buffer.dtype).view(shape)
