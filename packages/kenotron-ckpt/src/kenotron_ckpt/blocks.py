"""The blocks of a rank's tensors: which it holds, which it writes, and views of them.

A block is cut once more where it is larger than a piece may be, so that the replicas of one large
tensor share the work, files stay within bounds, and a reader of a part reads little else.

Pure functions of tensors, layouts and views of their grids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kenotron_dist import GridView, ViewOf
from kenotron_dist.boxes import Box, local_boxes, local_shape, replica_index, replicas, view_of
from kenotron_dist.placement import TensorLayout

Tensors = Mapping[str, tuple[Tensor, TensorLayout]]
"""Local tensors and their layouts, by keys that are unique on a rank."""

PIECE_BYTES = 1 << 26
"""A stored piece has no more bytes than this."""


@dataclass(frozen=True, eq=False)
class OwnBlock:
    """A box of one of this rank's tensors."""

    layout: TensorLayout
    box: Box
    view: Tensor
    """The box's elements, in the memory of the local tensor."""

    @property
    def name(self) -> str:
        """Logical name of the record."""
        return self.layout.name

    @property
    def key(self) -> str:
        """Name of the block in its file."""
        return f"{self.name}@{','.join(map(str, self.box.start))}"

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return self.view.numel() * self.view.element_size()


def blocks_of(tensors: Tensors, view: ViewOf) -> list[OwnBlock]:
    """Every block that a rank holds. Padding is in none; a tensor without elements has none.

    ``view`` is ``mesh.view`` of that rank, here and below.
    """
    return [
        OwnBlock(layout, box, view_of(tensor, layout, view(layout), box))
        for _, (tensor, layout) in sorted(tensors.items())
        for box in local_boxes(layout, view(layout))
        if box.numel
    ]


def split(block: OwnBlock, limit: int) -> list[OwnBlock]:
    """A block as blocks of at most ``limit`` bytes, cut along its first dimensions.

    A single element is never cut. The same cuts on every replica.
    """
    shape = block.box.shape
    if block.nbytes <= limit or block.box.numel == 1:
        return [block]
    dim = next(d for d, size in enumerate(shape) if size > 1)
    count = min(shape[dim], -(-block.nbytes // limit))
    edges = [shape[dim] * i // count for i in range(count + 1)]
    parts = []
    for low, high in zip(edges, edges[1:], strict=False):
        box = Box(
            _moved(block.box.local, dim, low),
            _moved(block.box.start, dim, low),
            (*shape[:dim], high - low, *shape[dim + 1 :]),
            block.box.parts,
        )
        part = OwnBlock(block.layout, box, block.view.narrow(dim, low, high - low))
        parts += split(part, limit)
    return parts


def share_of(blocks: Sequence[OwnBlock], view: ViewOf, limit: int = PIECE_BYTES) -> list[OwnBlock]:
    """The blocks that this rank writes: each block is written by one of its replicas.

    Blocks of more than ``limit`` bytes are cut. Those with the same replicas are dealt out largest
    first, each to the replica with the fewest bytes so far. The replicas hold the same list, so
    they agree without a word. Blocks that the rank holds under two keys (tied tensors) count once.
    """
    same_kind: dict[tuple, list[OwnBlock]] = {}
    seen = set()
    for block in (part for whole in blocks for part in split(whole, limit)):
        place = (block.name, block.box.start, block.box.shape)
        if place not in seen:
            seen.add(place)
            parts = tuple(sorted(set(block.box.parts)))
            kind = (block.layout.grid, parts, block.layout.stages)
            same_kind.setdefault(kind, []).append(block)
    own = []
    for group in same_kind.values():
        group.sort(key=lambda block: (-block.nbytes, block.name, block.box.start))
        own += _dealt(group, view(group[0].layout))
    return sorted(own, key=lambda block: (block.name, block.box.start))


def _dealt(group: Sequence[OwnBlock], view: GridView) -> list[OwnBlock]:
    first = group[0]
    load = [0] * replicas(first.layout, view, first.box)
    mine = replica_index(first.layout, view, first.box)
    own = []
    for block in group:
        writer = load.index(min(load))
        load[writer] += block.nbytes
        if writer == mine:
            own.append(block)
    return own


def _moved(index: Sequence[int], dim: int, by: int) -> tuple[int, ...]:
    return (*index[:dim], index[dim] + by, *index[dim + 1 :])


def problems_of(tensors: Tensors, view: ViewOf) -> list[str]:
    """One sentence for every tensor that contradicts its layout, or has no values."""
    found = _misfits(tensors, view)
    if found:
        return found
    for key, (tensor, layout) in sorted(tensors.items()):
        grid = view(layout)
        if (stage := grid.coords["pp"]) not in layout.stages:
            found.append(
                f"{key}: given on pipeline stage {stage}, but its layout says that "
                f"{layout.name} is on stages {list(layout.stages)}"
            )
        flat = layout.flat
        due = local_shape(layout, grid) if flat is None else (flat.stop - flat.start,)
        if tuple(tensor.shape) != due:
            found.append(
                f"{key}: the local tensor has shape {list(tensor.shape)}, its layout leaves "
                f"{list(due)} of {list(layout.shape)} on a rank"
            )
        if tensor.is_meta:
            found.append(f"{key}: the tensor is on the meta device and has no values")
    return found


def places_of(tensors: Tensors, view: ViewOf) -> list[tuple[Any, ...]]:
    """Return the place and layout of every tensor: equal as long as a plan for them is right.

    Raises ValueError, a line for each value that is not a pair, or whose layout no mesh can have.
    """
    if found := _misfits(tensors, view):
        raise ValueError("\n".join(found))
    return [
        (key, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), layout)
        for key, (tensor, layout) in tensors.items()
    ]


def _misfits(tensors: Tensors, view: ViewOf) -> list[str]:
    return [f"{key}: {fault}" for key, value in tensors.items() if (fault := _misfit(value, view))]


def _misfit(value: Any, view: ViewOf) -> str:
    """Describe what is wrong with a value of ``tensors``, or its layout on a mesh of these axes."""
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(pair[0], Tensor) or not isinstance(pair[1], TensorLayout):
        return (
            f"a {type(value).__name__} was given; it must be a pair (local tensor, TensorLayout); "
            "plain_tensors(module, optimizer) makes them for tensors that are whole on every rank"
        )
    tensor, layout = pair
    try:
        axes = view(layout).axes
    except ValueError as error:  # placed on axes of both grids
        return str(error)
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be stored; give tensor.to_dense()"
    for shard in layout.shards:
        if shard.axis not in axes:
            return f"cut over axis {shard.axis!r}; its grid has {', '.join(axes)}"
        if not 0 <= shard.dim < len(layout.shape):
            shape = list(layout.shape)
            return f"dimension {shard.dim} is cut; {shape} has {len(shape)}, counted from 0"
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
