"""A stand-in for an accelerator whose work runs later, for code that a machine without one runs.

Tensors of the device are ordinary CPU tensors. Work is queued on streams and runs when somebody
waits for it, or at once on the stream that is ``eager``: each order that streams allow may come up.
The target of a copy holds garbage until the copy has run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

GARBAGE = 0xA5
LAZY, DEFAULT, SIDE = "lazy", "default", "side"
"""Which stream runs at once what it may: none, the one of the training, those of copies."""


class Event:
    """A place in the queue of a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.work)

    def synchronize(self) -> None:
        self.stream.device.used("Event.synchronize")
        self.stream.device.gate.wait()
        self.run()

    def run(self) -> None:
        self.stream.run(self.place)


class Stream:
    """Work in the order in which it was queued."""

    def __init__(self, device: Accelerator, kind: str) -> None:
        self.device, self.kind = device, kind
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def queue(self, work: Callable[[], object]) -> None:
        with self.device.lock:
            self.work.append(work)
            if self.device.eager == self.kind:
                self.run(len(self.work))

    def run(self, place: int) -> None:
        with self.device.lock:
            while self.done < place:
                work, self.work[self.done] = self.work[self.done], int  # it holds tensors
                self.done += 1
                work()

    def record_event(self) -> Event:
        self.device.used("record_event")
        return Event(self)

    def wait_event(self, event: Event) -> None:
        self.device.used("wait_event")
        self.queue(event.run)

    def wait_stream(self, other: Stream) -> None:
        self.device.used("wait_stream")
        self.queue(Event(other).run)

    def __enter__(self) -> Stream:
        self.device.used("Stream.__enter__")
        self.before = self.device.current_stream()
        self.device.local.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self.device.local.stream = self.before


class Accelerator:
    """Stands in for ``torch.accelerator``, streams and copies; the device of this rank is 3.

    ``wrong`` names what a thread did while its current device was another; ``threads`` has the
    names of all threads that touched the device. Nobody who waits for an event goes on while
    ``gate`` is cleared.
    """

    def __init__(self, eager: str = LAZY) -> None:
        self.eager, self.index = eager, 3
        self.lock, self.local = threading.RLock(), threading.local()
        self.default = Stream(self, DEFAULT)
        self.gate = threading.Event()
        self.gate.set()
        self.local.index = self.index
        self.wrong: list[str] = []
        self.threads: set[str] = set()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy = torch._foreach_copy_
        monkeypatch.setattr(torch, "Stream", lambda device: Stream(self, SIDE))
        monkeypatch.setattr(torch, "_foreach_copy_", self.copy)
        for name in ("current_stream", "current_device_index", "set_device_index"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))

    def used(self, what: str) -> None:
        """Note that this thread touches the device."""
        name, index = threading.current_thread().name, self.current_device_index()
        self.threads.add(name)
        if index != self.index:
            self.wrong.append(f"{name}: {what} with device {index}")

    def current_device_index(self) -> int:
        return getattr(self.local, "index", 0)

    def set_device_index(self, index: int) -> None:
        self.local.index = index

    def current_stream(self, device: object = None) -> Stream:
        self.used("current_stream")
        return getattr(self.local, "stream", self.default)

    def queue(self, work: Callable[[], Any]) -> None:
        """Work of the training."""
        self.default.queue(work)

    def synchronize(self) -> None:
        self.default.run(len(self.default.work))

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False
    ) -> None:
        self.used("copy")
        assert non_blocking
        for target in targets:
            ctypes.memset(target.data_ptr(), GARBAGE, target.nbytes)
        self.current_stream().queue(lambda: self._run(targets, sources))

    def _run(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with torch.no_grad():
            self._copy(list(targets), list(sources))


class HostMemory:
    """Stands in for the CUDA runtime, and for torch's pinned allocator: counts locked bytes."""

    def __init__(self, error: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.rounded = self.peak = 0
        self.error = error

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "get_device_module", lambda: self)

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        """As torch: blocks are rounded up to powers of two, and kept when they are freed."""
        found = self._empty(*size, **options)
        if pin_memory:
            self.rounded += 1 << (found.nbytes - 1).bit_length()
            self._count()
        return found

    def cudart(self) -> HostMemory:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = nbytes
            self._count()
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def _count(self) -> None:
        self.peak = max(self.peak, self.rounded + sum(self.registered.values()))
