"""The values of one moment, copied to the host while training continues.

On an accelerator the copies run on a stream of their own, during the next forward and backward;
on the CPU they are made at once. What does not fit in the arena is copied as parts reach the disk.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kenotron_ckpt.host_buffer import HostBuffer
from kenotron_ckpt.part_files import PartFile
from kenotron_ckpt.threads import in_parallel

_WORTH_THREADS = 1 << 24
"""Bytes from which several threads copy faster than one."""


class Snapshot:
    """Copies of all blocks of ``parts``; as many as the arena holds begin at once.

    Args:
        parts: the parts.
        arena: where they go.
        device: holds the values.
    """

    def __init__(self, parts: Sequence[PartFile], arena: HostBuffer, device: torch.device) -> None:
        self._parts, self._arena = parts, arena
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._events: dict[int, torch.Event] = {}
        self._change = threading.Condition()
        self._copied: set[int] = set()
        self._ended = False
        if self._stream is not None:  # what was queued before must be done first
            self._stream.wait_stream(torch.accelerator.current_stream(device))
        self.hosts: dict[int, list[Tensor]] = {}
        self.first = range(min(len(arena.slots), len(parts)))
        """The parts whose copies have begun when this returns."""
        for index in self.first:
            self._copy(index)

    def ready(self, index: int) -> list[Tensor]:
        """Wait for a part's copy; its blocks on the host, each of its block's shape."""
        if index in self._events:
            self._events[index].synchronize()
        return self.hosts.pop(index)

    def reuse(self, index: int) -> int | None:
        """The part with this index is on the disk: copy the next one to its slot.

        Returns the index of that part; None when all are copied.
        """
        following = index + len(self._arena.slots)
        if following >= len(self._parts):
            return None
        self._copy(following)
        return following

    def end(self) -> None:
        """Mark the snapshot complete or failed."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def wait(self, parts: int | None = None) -> float:
        """Return when the values of the first ``parts`` parts (None: of all) may change; seconds
        that took.

        On an accelerator it is the device that waits for copies under way, not the caller.
        """
        begun = time.perf_counter()
        wanted = range(len(self._parts) if parts is None else parts)
        with self._change:
            self._change.wait_for(lambda: self._ended or self._copied.issuperset(wanted))
        self._hold(len(wanted))
        return time.perf_counter() - begun

    def _hold(self, parts: int) -> None:
        """Make what is queued on the device from now on wait for the first ``parts`` copies."""
        if self._stream is not None:
            stream = torch.accelerator.current_stream(self._stream.device)
            for index in range(parts):
                if index in self._events:  # else the copy is not read: a writer failed
                    stream.wait_event(self._events[index])

    def _copy(self, index: int) -> None:
        part = self._parts[index]
        hosts = self._arena.hosts(index, part)
        with torch.no_grad():
            if self._stream is None:
                pairs = [(h, block.view) for h, block in zip(hosts, part.blocks, strict=True)]
                _copy_on_host(pairs, torch.get_num_threads())
            else:
                with self._stream:
                    views = [block.view for block in part.blocks]
                    torch._foreach_copy_(hosts, views, non_blocking=True)
                    self._events[index] = self._stream.record_event()
        self.hosts[index] = hosts
        with self._change:
            self._copied.add(index)
            self._change.notify_all()


def _copy_on_host(pairs: Sequence[tuple[Tensor, Tensor]], threads: int) -> None:
    """Copy values within host memory: (where to, where from), by as many threads as torch may use.

    torch itself would wake its threads for every tensor, and wait for the last of them: on a busy
    machine that took eight times as long.
    """
    large = sum(host.numel() * host.element_size() for host, _ in pairs) >= _WORTH_THREADS
    count = min(threads, len(pairs)) if large else 1
    largest_first = sorted(pairs, key=lambda pair: -pair[0].numel() * pair[0].element_size())
    in_parallel(_copy_one, largest_first, count)


def _copy_one(pair: tuple[Tensor, Tensor]) -> None:
    host, view = pair
    if view.is_contiguous() and view.device.type == "cpu":
        ctypes.memmove(host.data_ptr(), view.data_ptr(), host.numel() * host.element_size())
    else:
        with torch.no_grad():  # a thread has its own switch
            host.copy_(view)
