"""The flags of a layout: the same in every word that runs a model of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

LAYOUT = {
    "pp": "stages of the pipeline",
    "dp": "replicas that share the texts",
    "cp": "ranks that share a text that is scored; texts that are continued they share as dp does",
    "tp": "parts of each weight",
    "ep": "ranks of dp x cp x tp that share the experts",
}
"""Axes of a mesh, with their help."""


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each axis of a mesh."""
    for axis, what in LAYOUT.items():
        text = f"{what}; 0: as trained (default: 1)"
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=text)


def layout_sizes(given: argparse.Namespace, trained: Mapping[str, int]) -> dict[str, int]:
    """Return the ranks along each axis.

    Args:
        given: the flags; 0 stands for the size of the training.
        trained: sizes of the mesh of the training, where they are known; else 1.

    Raises:
        ValueError: a negative number.
    """
    asked = {axis: int(getattr(given, axis)) for axis in LAYOUT}
    for axis, size in asked.items():
        if size < 0:
            raise ValueError(f"--{axis} {size}: give a number of ranks, or 0 for the checkpoint's")
    return {axis: size or int(trained.get(axis, 1)) for axis, size in asked.items()}
