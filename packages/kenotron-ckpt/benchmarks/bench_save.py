"""Saving and loading a state of 1 GB: this package against what a user would pick instead.

A plain module with AdamW-like state (fp32 tensors of 64 to 16,384 KB and some small ones) lies on
one device. All contestants take turns in every round; printed are medians in seconds and their
ratio to ours, in Markdown. ``blocked``: until the call returns; ``durable``: until the bytes are on
the disk (``fsync`` is added for those that do not call it). ``memcpy`` and ``raw write`` are the
floors: the bytes copied to memory in use, and written from it with one ``fsync``.

    python packages/kenotron-ckpt/benchmarks/bench_save.py [--gb 1] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from kenotron_ckpt import Saver, load
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout

Times = tuple[float, float]
"""Seconds blocked, seconds until durable."""
SMALL = 40
"""So many tensors of 4 KB are among the large ones."""


def state_of(gigabytes: float, device: str) -> dict[str, Tensor]:
    """Tensors of together this size; every value differs from its neighbours."""
    left = int(gigabytes * 1e9) // 4
    sizes = [1024] * SMALL
    while left > sum(sizes):
        sizes += [16384 * 4 << (2 * step) for step in range(4)]
    tensors = {}
    for number, size in enumerate(sizes):
        kept = min(size, left)
        left -= kept
        if kept:
            tensors[f"layers.{number}"] = torch.randn(kept, device=device)
    return tensors


def seconds(function: Callable[[], object]) -> float:
    """How long a call takes."""
    settle()
    begin = time.perf_counter()
    function()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def settle() -> None:
    """What others have left to the disk and the device is done."""
    os.sync()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def sync_folder(folder: Path) -> None:
    """Put all files of a folder on the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())


class Contest:
    """The state, and every way to save it and to load it."""

    def __init__(self, gigabytes: float, device: str, root: Path) -> None:
        self.state, self.root = state_of(gigabytes, device), root
        self.blank = {name: torch.zeros_like(each) for name, each in self.state.items()}
        self.nbytes = sum(each.numel() * 4 for each in self.state.values())
        self.arena = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
        self.mesh = Mesh.connect(device=device)
        layouts = {name: TensorLayout(name, tuple(t.shape)) for name, t in self.state.items()}
        self.tensors = {name: (each, layouts[name]) for name, each in self.state.items()}
        self.wanted = {name: (each, layouts[name]) for name, each in self.blank.items()}
        self.saver = Saver(root / "ours", self.mesh)
        self.verifying = Saver(root / "ours, verified", self.mesh, verify=True)
        self.blocking = Saver(root / "ours, at once", self.mesh, background=False)
        self.contestants, self.step = (self.saver, self.verifying, self.blocking), 0
        for saver in (self.saver, self.verifying):
            saver.reserve(self.tensors)

    def savers(self) -> dict[str, Callable[[], Times]]:
        """Contestants by name."""
        return {
            "memcpy": self.memcpy,
            "raw write": self.raw,
            "ours": lambda: self.ours(self.saver),
            "ours, read back": lambda: self.ours(self.verifying),
            "ours, blocking": lambda: self.ours(self.blocking),
            "torch.save": lambda: self.simple(lambda f: torch.save(self.state, f / "a"), "torch"),
            "safetensors": lambda: self.simple(
                lambda f: save_file(self.state, f / "a"), "safetensors"
            ),
            "DCP save": lambda: self.simple(
                lambda f: dcp.save({"s": self.state}, checkpoint_id=f, no_dist=True), "dcp"
            ),
            "DCP async_save": self.dcp_async,
        }

    def loaders(self) -> dict[str, Callable[[], object]]:
        """Contestants by name; what they read was written by ``savers``."""
        root, state = self.root, {"s": self.blank}
        return {
            "ours": lambda: load(root / "ours", self.wanted, self.mesh),
            "ours, unverified": lambda: load(root / "ours", self.wanted, self.mesh, verify=False),
            "torch.load": lambda: self._fill(torch.load(root / "torch" / "a", weights_only=True)),
            "safetensors": lambda: self._fill(load_file(root / "safetensors" / "a")),
            "DCP load": lambda: dcp.load(state, checkpoint_id=root / "dcp", no_dist=True),
        }

    def memcpy(self) -> Times:
        """One copy of all bytes into memory that is in use."""
        flat = torch.empty(0)
        whole = torch.cat(
            [each.view(-1) for each in self.state.values()], out=flat.to(self.mesh.device)
        )
        spent = seconds(lambda: self.arena.copy_(whole.view(torch.uint8)))
        return spent, spent

    def raw(self) -> Times:
        """The bytes of the arena to one file, with fsync."""

        def write() -> None:
            with (self.root / "raw").open("wb", buffering=0) as file:
                view, done = memoryview(self.arena.numpy()), 0
                while done < self.nbytes:
                    done += file.write(view[done : done + (1 << 24)])
                os.fsync(file.fileno())

        spent = seconds(write)
        return spent, spent

    def ours(self, saver: Saver) -> Times:
        """A save of a new step; the former one is removed before."""
        self.step += 1
        shutil.rmtree(saver.folder / str(self.step - len(self.contestants)), ignore_errors=True)
        settle()
        begin = time.perf_counter()
        saver.save(self.step, self.tensors, {})
        blocked = time.perf_counter() - begin
        saver.finish()
        return blocked, time.perf_counter() - begin

    def simple(self, save: Callable[[Path], object], name: str) -> Times:
        """A save that returns when its files are written."""
        folder = self._fresh(name)
        blocked = seconds(lambda: save(folder))
        return blocked, blocked + _timed(lambda: sync_folder(folder))

    def dcp_async(self) -> Times:
        """torch's asynchronous save, with pinned staging where there is a device."""
        folder = self._fresh("dcp async")
        settle()
        begin = time.perf_counter()
        future = dcp.async_save({"s": self.state}, checkpoint_id=folder, no_dist=True)
        blocked = time.perf_counter() - begin
        future.result()
        sync_folder(folder)
        return blocked, time.perf_counter() - begin

    def _fresh(self, name: str) -> Path:
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def _fill(self, found: dict[str, Tensor]) -> None:
        for name, each in found.items():
            self.blank[name].copy_(each)


def _timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(contest: Contest, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of all contestants, which take turns; the first round does not count."""
    found: dict[str, dict[str, list[float]]] = {"blocked": {}, "durable": {}, "load": {}}
    for number in range(rounds + 1):
        for name, save in contest.savers().items():
            blocked, durable = save()
            if number:
                found["blocked"].setdefault(name, []).append(blocked)
                found["durable"].setdefault(name, []).append(durable)
        for name, run in contest.loaders().items():
            for each in contest.blank.values():
                each.zero_()
            spent = seconds(run)
            if any(not torch.equal(contest.blank[n], t) for n, t in contest.state.items()):
                raise RuntimeError(f"{name} did not load what was saved")
            if number:
                found["load"].setdefault(name, []).append(spent)
    return found


def table(name: str, times: dict[str, list[float]], nbytes: int) -> str:
    """A Markdown table of one kind of times."""
    ours = statistics.median(times["ours"])
    lines = [f"| {name} | s | GB/s | time over ours |", "|---|---|---|---|"]
    for who, values in times.items():
        middle = statistics.median(values)
        lines.append(
            f"| {who} | {middle:.3f} | {nbytes / middle / 1e9:.2f} | {middle / ours:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="also write all times to this file")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP's, in one process
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        contest = Contest(chosen.gb, chosen.device, Path(folder))
        found = measure(contest, chosen.rounds)
        for saver in (contest.saver, contest.verifying, contest.blocking):
            saver.close()
    surroundings = {
        "bytes": contest.nbytes,
        "device": chosen.device,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(surroundings)
    for name, times in found.items():
        print(f"\n{table(name, times, contest.nbytes)}")
    if chosen.json:
        chosen.json.write_text(json.dumps({**surroundings, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
