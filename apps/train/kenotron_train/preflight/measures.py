"""Rates of a rank and its host: products, memory, disk, and the link to the rank before it."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kenotron_dist import Mesh, barrier, gather_objects, shift

MIB = 1 << 20
LEAST = 3
"""Repetitions at least, of which the fastest counts: others may have been interrupted."""


@dataclass(frozen=True, kw_only=True)
class RankRates:
    """Rates of a rank; None where there is nothing to measure."""

    rank: int
    host: str
    products: float
    """TFLOP/s of square products: in float32 on a CPU, in bfloat16 on a GPU."""
    memory: float
    """GB/s that a copy reads and writes."""
    disk: float | None
    """GB/s of a file that is written through to the disk, on the first rank of each host."""
    link: float | None
    """GB/s that arrive from the rank before it, while all ranks send to the next one."""


def rates_of_all(mesh: Mesh, folder: Path, seconds: float) -> list[RankRates]:
    """Measure every rank, all at once as in a training; in rank order.

    Args:
        mesh: the ranks.
        folder: where checkpoints would be.
        seconds: of each of the four measurements.

    Collective over the mesh. Raises OSError where the folder cannot be written.
    """
    hosts = gather_objects(socket.gethostname(), mesh.world)
    first = hosts.index(hosts[mesh.rank]) == mesh.rank
    found = RankRates(
        rank=mesh.rank,
        host=hosts[mesh.rank],
        products=_products(mesh, seconds),
        memory=_memory(mesh, seconds),
        disk=_disk(folder, seconds) if first else None,
        link=_link(mesh, seconds),
    )
    return [RankRates(**each) for each in gather_objects(asdict(found), mesh.world)]


def _fastest(mesh: Mesh | None, seconds: float, work: Callable[[], object]) -> float:
    """Seconds of the fastest call; the first one, which prepares, is not counted."""
    work()
    end, times = _settled(mesh) + seconds, list[float]()
    while len(times) < LEAST or time.perf_counter() < end:
        begun = _settled(mesh)
        work()
        times.append(_settled(mesh) - begun)
    return min(times)


def _settled(mesh: Mesh | None) -> float:
    """Return the time when the device has done its work."""
    if mesh is not None and mesh.device.type == "cuda":
        torch.accelerator.synchronize(mesh.device)
    return time.perf_counter()


def _products(mesh: Mesh, seconds: float) -> float:
    gpu = mesh.device.type == "cuda"
    side, dtype = (4096, torch.bfloat16) if gpu else (512, torch.float32)
    square = torch.randn(side, side, device=mesh.device).to(dtype)
    return 2 * side**3 / _fastest(mesh, seconds, lambda: square @ square) / 1e12


def _memory(mesh: Mesh, seconds: float) -> float:
    source = torch.ones((1024 if mesh.device.type == "cuda" else 64) * MIB, device=mesh.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(mesh, seconds, lambda: target.copy_(source)) / 1e9


def _disk(folder: Path, seconds: float) -> float:
    data = os.urandom(64 * MIB)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:

        def write() -> None:
            file.seek(0)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

        return len(data) / _fastest(None, seconds, write) / 1e9


def _link(mesh: Mesh, seconds: float) -> float | None:
    """As many transfers on every rank: of each, a rank measures until its own has arrived."""
    if mesh.world.size == 1:
        return None
    sent = torch.ones(4 * MIB, device=mesh.device)
    arrived, times = torch.empty_like(sent), list[float]()
    for number in range(LEAST + 1 + round(8 * seconds)):
        barrier(mesh.world)
        begun = _settled(mesh)
        shift(sent, mesh.world, out=arrived)
        if number:  # the first one connects
            times.append(_settled(mesh) - begun)
    return sent.nbytes / min(times) / 1e9
