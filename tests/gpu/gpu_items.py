"""The items of the GPU day: what one is, and what it is given.

An item is a generator. Each value that it yields is a dict of results, merged into its record at
once, so that a timeout or a crash keeps what was measured before. A value is a number, a text, or
a dict of them (one row of a table).
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Result = dict[str, Any]
Body = Callable[["Setting"], Iterator[Result]]

SHORTEST_SAMPLE_MS = 2.0
"""Shorter calls are repeated within one timed sample until it lasts this long."""


@dataclass(frozen=True)
class Setting:
    """Where an item runs and how large it is."""

    device: str
    """``cuda``, or ``cpu`` in a dry run."""
    dry: bool
    """Toy sizes on the CPU: every line runs, and no number means anything."""
    scratch: Path
    """An empty folder, removed after the item."""

    def pick(self, full: Any, toy: Any) -> Any:
        """Return ``full``, or ``toy`` in a dry run."""
        return toy if self.dry else full

    def prepare(self) -> None:
        """Set up a process before its item runs: threads, compiler and random numbers."""
        torch.manual_seed(0)
        if self.dry:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            torch.set_num_threads(1)
            # Tracing is tested; generating C++ would take most of the time of a dry run.
            torch.compile = functools.partial(torch.compile, backend="eager")

    def synchronize(self) -> None:
        """Wait until the device has done all work queued so far."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Return cached device memory, so that one measurement leaves nothing to the next."""
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def held_bytes(self) -> int:
        """Bytes of all live tensors on the device; 0 on the CPU, which does not count them."""
        return torch.cuda.memory_allocated() if self.device == "cuda" else 0

    def reset_peak(self) -> None:
        """Start a new measurement of ``peak_bytes``."""
        self.synchronize()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Most bytes of live tensors on the device since ``reset_peak``; 0 on the CPU."""
        self.synchronize()
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else 0

    def median_ms(self, call: Callable[[], Any], *, repeats: int = 10, warmup: int = 3) -> float:
        """Median milliseconds of ``call`` on the device, after ``warmup`` calls."""
        repeats, warmup = self.pick(repeats, 1), self.pick(warmup, 1)
        for _ in range(warmup):
            call()
        self.synchronize()
        if self.device != "cuda":
            return 1e3 * statistics.median(self.wall_seconds(call, repeats))
        inner = max(1, int(SHORTEST_SAMPLE_MS / max(self._samples(call, 1, 1)[0], 1e-3)))
        return statistics.median(self._samples(call, repeats, inner))

    def wall_seconds(self, call: Callable[[], Any], repeats: int) -> list[float]:
        """Wall-clock seconds of each of ``repeats`` calls, the device's work included."""
        found = []
        for _ in range(repeats):
            self.synchronize()
            began = time.perf_counter()
            call()
            self.synchronize()
            found.append(time.perf_counter() - began)
        return found

    @staticmethod
    def _samples(call: Callable[[], Any], repeats: int, inner: int) -> list[float]:
        """Milliseconds a call of each sample, between two events of the device."""
        pairs = []
        for _ in range(repeats):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(inner):
                call()
            last.record()
            pairs.append((first, last))
        torch.cuda.synchronize()
        return [first.elapsed_time(last) / inner for first, last in pairs]


@dataclass(frozen=True)
class Item:
    """One thing that is measured or checked, in a process of its own."""

    name: str
    seconds: float
    """Timeout on a GPU."""
    run: Body
    needs: tuple[str, ...] = ()
    """Modules without which it is not run."""
    gpu: str = ""
    """Why it needs a GPU; empty: a dry run runs it on the CPU."""


def item(
    name: str, seconds: float, *, needs: tuple[str, ...] = (), gpu: str = ""
) -> Callable[[Body], Item]:
    """Make an item of a generator function; arguments are the fields of ``Item``."""
    return lambda run: Item(name, seconds, run, needs, gpu)


class NotRunError(Exception):
    """Raised by an item that cannot run here; its message is the reason in the record."""


def check(holds: bool, text: str) -> None:
    """Raise AssertionError with ``text`` unless ``holds``: the item has then failed."""
    if not holds:
        raise AssertionError(text)


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error, at most 200 characters."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:200]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of ``exact``, computed in fp64 on the CPU."""
    found, exact = found.detach().double().cpu(), exact.detach().double().cpu()
    return ((found - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()
