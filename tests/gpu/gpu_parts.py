"""The parts of the GPU day, the most valuable first."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gpu_items import Item


class Part(NamedTuple):
    """Some items that share a time limit."""

    minutes: float
    module: str
    text: str

    @property
    def items(self) -> list[Item]:
        """The items, in the order of their value; imports the libraries."""
        return importlib.import_module(self.module).ITEMS


PARTS = {
    "probe": Part(
        4, "gpu_probe", "copies, products, attention back ends, lines that synchronise"
    ),
    "right": Part(
        7, "gpu_right", "against fp64, the CPU and plain versions; checkpoints, resume"
    ),
    "ranks": Part(
        9, "gpu_ranks", "NCCL with ranks that share the GPU: verbs, layouts, failures"
    ),
    "speed": Part(
        9.5, "gpu_speed", "layer, head, optimizer, whole steps, contestants in turns"
    ),
    "profile": Part(4, "gpu_profiling", "kernels by time, gaps of the GPU with their host line"),
    "save": Part(4, "gpu_saving", "device to host, time that a save blocks, peak of a resume"),
}  # fmt: skip
