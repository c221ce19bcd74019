"""First values of parameters: a function of seed and logical name, never of the layout.

A logical tensor is drawn in tiles of 256 x 256, each from a generator keyed by (seed, name, tile):
a rank draws only the tiles that touch its blocks, and every layout cuts the same whole tensor.
Values are drawn in fp32 on the CPU and cast last, so CPU and GPU runs begin with the same weights.

The generator is numpy's Philox, not torch's: torch's CPU generator uses 32 bits of its seed, and a
model of a million tiles would repeat some of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from kenotron_dist.boxes import Box, Shape, local_boxes
from kenotron_dist.grid_view import GridView, ViewOf
from kenotron_dist.hashing import key
from kenotron_dist.placement import TensorLayout, named_parameters, tie_storages

__all__ = [
    "Computed",
    "Constant",
    "Initializer",
    "Normal",
    "Uniform",
    "fill_",
    "initialize",
    "normal_block",
    "uniform_block",
]

TILE = 256


@dataclass(frozen=True)
class Normal:
    """Independent draws from N(0, std**2)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere: 1 for norms, 0 for biases."""

    value: float


@dataclass(frozen=True)
class Uniform:
    """Independent draws between -bound and bound."""

    bound: float


class Computed(Protocol):
    """Any other rule, by which values depend on their place in the logical tensor only."""

    def block(self, layout: TensorLayout, box: Box, *, seed: int) -> Tensor:
        """Return the values (fp32, CPU) of one block of a logical tensor, of ``box.shape``."""
        ...


Initializer = Normal | Constant | Uniform | Computed
"""A rule for the first values of one parameter."""


def initialize(
    module: nn.Module,
    layouts: Mapping[str, TensorLayout],
    view_of: ViewOf,
    *,
    seed: int,
    initializer: Callable[[TensorLayout], Initializer],
) -> None:
    """Fill every parameter of ``module`` (this rank's part of a model) exactly once.

    No communication.

    Args:
        module: off meta.
        layouts: of the whole model, by parameter name.
        view_of: from a layout to the view of its grid (``mesh.view``).
        seed: of the random numbers.
        initializer: chooses by the role and the shape of a logical tensor.

    Raises:
        ValueError: a parameter has no layout or is still on meta.
    """
    tie_storages(module)
    filled: set[str] = set()
    for path, parameter in named_parameters(module).items():
        if path not in layouts:
            raise ValueError(f"parameter {path!r} has no layout: was it added after the model?")
        if parameter.is_meta:
            raise ValueError(f"parameter {path!r} is on meta: call to_empty first")
        layout = layouts[path]
        if layout.name in filled:
            continue
        filled.add(layout.name)
        fill_(parameter.data, layout, view_of(layout), initializer(layout), seed=seed)


def fill_(
    local: Tensor, layout: TensorLayout, view: GridView, how: Initializer, *, seed: int
) -> None:
    """Overwrite a local tensor with its blocks of the logical tensor; padding becomes zero.

    Args:
        local: the local tensor, of shape ``local_shape(layout, view)``.
        layout: how the logical tensor is cut.
        view: the grid, and the coordinates of this rank.
        how: first values of the logical tensor.
        seed: of the run; values depend on it, on the name and on the place in the logical tensor.
    """
    local.zero_()
    for box in local_boxes(layout, view):
        if isinstance(how, Constant):
            box.of_local(local).fill_(how.value)
        else:
            box.of_local(local).copy_(_values(how, layout, box, seed))


def _values(how: Normal | Uniform | Computed, layout: TensorLayout, box: Box, seed: int) -> Tensor:
    if isinstance(how, Normal):
        return normal_block(layout.name, layout.shape, box, seed=seed).mul_(how.std)
    if isinstance(how, Uniform):
        draws = uniform_block(layout.name, layout.shape, box, seed=seed)
        return draws.mul_(2 * how.bound).sub_(how.bound)
    return how.block(layout, box, seed=seed)


def normal_block(name: str, shape: Shape, box: Box, *, seed: int) -> Tensor:
    """Standard normal values (fp32, CPU) of one block of logical tensor ``name`` of ``shape``."""
    return _block(name, shape, box, seed, np.random.Generator.standard_normal)


def uniform_block(name: str, shape: Shape, box: Box, *, seed: int) -> Tensor:
    """Values from 0 to below 1 (fp32, CPU) of one block of logical tensor ``name`` of ``shape``."""
    return _block(name, shape, box, seed, np.random.Generator.random)


def _block(name: str, shape: Shape, box: Box, seed: int, draw: Callable[..., Any]) -> Tensor:
    """Draws of the tiles that a block touches; each tile has a generator of its own."""
    rows_cols = _matrix(shape)
    start, extent = _matrix_block(box)
    out = torch.empty(box.shape)
    lead = itertools.product(*(range(n) for n in box.shape[:-2]))
    for index in lead:  # tensors of more than two dims are stacks of matrices
        stacked = tuple(i + s for i, s in zip(index, box.start, strict=False))
        view = out[index].view(extent)
        for tile, inside, target in _tiles(rows_cols, start, extent):
            generator = np.random.Generator(
                np.random.Philox(key=key(seed, name, *stacked, *tile.index))
            )
            values = draw(generator, tile.shape, dtype=np.float32)
            view[target] = torch.from_numpy(values)[inside]
    return out


@dataclass(frozen=True)
class _DrawnTile:
    index: tuple[int, int]
    shape: tuple[int, int]


_Slices = tuple[slice, slice]


def _tiles(
    shape: tuple[int, int], start: tuple[int, int], extent: tuple[int, int]
) -> Iterator[tuple[_DrawnTile, _Slices, _Slices]]:
    """Tiles that touch a block of a matrix; where the overlap lies in the tile and the block."""
    ranges = [range(s // TILE, -(-(s + e) // TILE)) for s, e in zip(start, extent, strict=True)]
    for index in itertools.product(*ranges):
        size, inside, target = [], [], []
        for i, whole, s, e in zip(index, shape, start, extent, strict=True):
            base = i * TILE
            low, high = max(base, s), min(base + TILE, s + e)
            size.append(min(TILE, whole - base))
            inside.append(slice(low - base, high - base))
            target.append(slice(low - s, high - s))
        yield (
            _DrawnTile((index[0], index[1]), (size[0], size[1])),
            (inside[0], inside[1]),
            (target[0], target[1]),
        )


def _matrix(shape: Shape) -> tuple[int, int]:
    """The last two dims; a vector is one row."""
    return (shape[-2], shape[-1]) if len(shape) > 1 else (1, math.prod(shape))


def _matrix_block(box: Box) -> tuple[tuple[int, int], tuple[int, int]]:
    if len(box.shape) > 1:
        return (box.start[-2], box.start[-1]), (box.shape[-2], box.shape[-1])
    return (0, box.start[0] if box.start else 0), (1, math.prod(box.shape))
