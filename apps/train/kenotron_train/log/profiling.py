"""torch's profiler over some steps, by the section ``profiler``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from kenotron_config import ProfilerConfig
from kenotron_dist import Mesh

HISTORY = 100_000
"""Allocations that a memory snapshot remembers."""


def trace_folder(section: ProfilerConfig | None, run: Path) -> Path | None:
    """Return the folder of traces; None without the section."""
    if section is None:
        return None
    named = section.profiler_export_path
    return Path(named) if named else run / "profiler"


class Profile:
    """Follows the steps of a run; does nothing without the section. Every rank has one.

    A context manager. At the end of each round a rank writes ``rank<r>.step<n>.pt.trace.json``,
    which TensorBoard's plugin, Perfetto and chrome://tracing open, and, with ``profile_memory`` on
    CUDA, ``rank<r>.step<n>.memory.pickle``. ``say`` is called with its path. A file
    that cannot be written is a line, not the end of the run.
    """

    def __init__(
        self,
        section: ProfilerConfig | None,
        run: Path,
        mesh: Mesh,
        first_step: int,
        say: Callable[[str, str], None],
    ) -> None:
        self._say, self._rank, self._step = say, mesh.rank, first_step - 1
        self._folder = trace_folder(section, run)
        self._profile = None
        self._snapshots: Any = None
        if section is None:
            return
        on_cuda = mesh.device.type == "cuda"
        if section.profile_memory and on_cuda:
            self._snapshots = torch.get_device_module(mesh.device).memory
        elif section.profile_memory:
            say(
                "profiler.profile_memory: traces have the memory of operations; there are no "
                f"memory snapshots on {mesh.device.type}, they need CUDA",
                "warning",
            )
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda,
            schedule=schedule(
                skip_first=section.skip_first,
                wait=section.wait,
                warmup=section.warmup,
                active=section.active,
                repeat=section.repeat,
            ),
            on_trace_ready=self._write,
            record_shapes=section.record_shapes,
            profile_memory=section.profile_memory,
            with_stack=section.with_stack,
        )

    def __enter__(self) -> Profile:
        if self._profile is not None:
            if self._snapshots is not None:
                self._snapshots._record_memory_history(max_entries=HISTORY)
            # Rounds are files of their own, as wanted.
            warnings.filterwarnings("ignore", message=".*Profiler clears events at the end")
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            self._profile.stop()
            if self._snapshots is not None:
                self._snapshots._record_memory_history(enabled=None)

    def step(self) -> None:
        """A step is over."""
        self._step += 1
        if self._profile is not None:
            self._profile.step()

    def _write(self, profiled: profile) -> None:
        assert self._folder is not None  # there is a section
        stem = self._folder / f"rank{self._rank}.step{self._step}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _in_place(Path(f"{stem}.pt.trace.json"), profiled.export_chrome_trace)
            if self._snapshots is not None:
                _in_place(Path(f"{stem}.memory.pickle"), self._snapshots._dump_snapshot)
        except (OSError, RuntimeError) as error:
            self._say(f"no profile of step {self._step} in {self._folder}: {error}", "error")
            return
        self._say(f"Profile of the steps up to {self._step} in {self._folder}", "info")


def _in_place(path: Path, write: Callable[[str], Any]) -> None:
    """Write a file next to its place and move it there whole."""
    fresh = path.with_name(f"new.{path.name}")
    write(str(fresh))
    fresh.replace(path)
