"""Slice arithmetic of placements: which global elements a local tensor holds, and who else does.

Pure functions of a layout and a view of its grid; no process, no group. A *box* is a rectangular
block of a logical tensor. Everything that sums, counts, stores or draws elements asks this file.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from torch import Tensor

from kenotron_dist.flat import Shape, flat_blocks
from kenotron_dist.grid_view import GridView
from kenotron_dist.placement import TensorLayout
from kenotron_dist.placement_kinds import Chunk, Shard

__all__ = [
    "Box",
    "GradientSum",
    "gather_into",
    "gradient_sums",
    "local_boxes",
    "local_shape",
    "norm_weight",
    "replica_index",
    "replicas",
    "scatter",
    "view_of",
]


@dataclass(frozen=True)
class Box:
    """A block that a rank holds: where it lies locally and in the logical tensor."""

    local: Shape
    """First index of the block in the local tensor, per dimension."""
    start: Shape
    """First index of the block in the logical tensor, per dimension."""
    shape: Shape
    """Elements along each dimension."""
    parts: tuple[tuple[str, int], ...] = ()
    """(axis, different pieces along it); an axis left out holds the same block everywhere."""

    @property
    def numel(self) -> int:
        """Elements in the block."""
        return math.prod(self.shape)

    def of_local(self, tensor: Tensor) -> Tensor:
        """Return a view of the block, of its shape, in a local tensor (of ``local_shape``)."""
        return tensor[_slices(self.local, self.shape)]

    def of_global(self, tensor: Tensor) -> Tensor:
        """Return a view of the block, of its shape, in the whole tensor (of ``layout.shape``)."""
        return tensor[_slices(self.start, self.shape)]


@dataclass(frozen=True)
class GradientSum:
    """Blocks of a local gradient that must be summed over the ranks that share them."""

    axis: str
    parts: int
    """1: over the whole axis; otherwise over ``mesh.subaxis(axis, parts)``."""
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class _Run:
    """Consecutive elements of one dimension."""

    local: int
    start: int
    size: int
    parts: tuple[tuple[str, int], ...] = ()


def local_shape(layout: TensorLayout, view: GridView) -> Shape:
    """Shape of the local tensor, padding included: the same on every rank.

    A ``FlatSlice`` is not applied: this is the tensor whose flattened elements it counts.
    Raises ValueError when a size does not divide.
    """
    shape = list(layout.shape)
    for shard in layout.shards:
        ranks = view.sizes[shard.axis]
        chunks = _chunks(shard, shape[shard.dim])
        shape[shard.dim] = sum(_piece(chunk, ranks, shard) for chunk in chunks)
    return tuple(shape)


def local_boxes(layout: TensorLayout, view: GridView) -> list[Box]:
    """The blocks that the rank of the view holds, in the order of its local tensor.

    Padding is in no block. With a ``FlatSlice`` only elements in its range are listed; ``local``
    still counts in the unsliced local tensor. Raises ValueError when a size does not divide.
    """
    dims = [_runs(layout, dim, view) for dim in range(len(layout.shape))]
    boxes = [
        Box(
            tuple(run.local for run in runs),
            tuple(run.start for run in runs),
            tuple(run.size for run in runs),
            tuple(part for run in runs for part in run.parts),
        )
        for runs in itertools.product(*dims)
    ]
    if layout.flat is None:
        return boxes
    return _within(boxes, layout, view)


def replicas(layout: TensorLayout, view: GridView, box: Box) -> int:
    """Return the number of ranks of the grid that hold the block (an element of it)."""
    different = dict(box.parts)
    copies = math.prod(
        size // different.get(axis, 1) for axis, size in view.sizes.items() if axis != "pp"
    )
    return copies * len(layout.stages)


def replica_index(layout: TensorLayout, view: GridView, box: Box) -> int:
    """Return the number of the view's rank among the block's ``replicas``, from 0."""
    different, flat = dict(box.parts), layout.flat
    repeated = flat.axes[:1] if flat is not None and flat.block is not None else ()
    index = layout.stages.index(view.coords["pp"]) if "pp" in view.sizes else 0
    for axis, size in view.sizes.items():
        if axis != "pp":
            own, copies = view.coords[axis], size // different.get(axis, 1)
            index = index * copies + (own // different[axis] if axis in repeated else own % copies)
    return index


def norm_weight(layout: TensorLayout, view: GridView, box: Box) -> float:
    """1 on the first rank that holds the block, 0 on its other replicas.

    Summed over the grid every logical element counts once. A weight of 1/replicas would give the
    same, but 1/3 is not exact and every replica would work.
    """
    return float(replica_index(layout, view, box) == 0)


def gradient_sums(layout: TensorLayout, view: GridView) -> list[GradientSum]:
    """The sums that make a local gradient whole, apart from those over data and over ties.

    To be done one after the other. All ranks list the same (axis, parts) in the same order, because
    all make the groups; only ``boxes`` differ, and are empty on a rank that holds mere padding.
    """
    boxes, sizes = local_boxes(layout, view), view.sizes
    found = {(axis, 1): list(boxes) for axis in layout.partial_axes if sizes[axis] > 1}
    for shard in layout.shards:
        for chunk in shard.chunks or ():
            parts = chunk.parts or sizes[shard.axis]
            if parts < sizes[shard.axis]:
                found.setdefault((shard.axis, parts), [])
    for box in boxes:
        for axis, parts in box.parts:
            if parts < sizes[axis]:
                found[axis, parts].append(box)
    return [GradientSum(axis, parts, tuple(own)) for (axis, parts), own in found.items()]


def scatter(whole: Tensor, layout: TensorLayout, view: GridView) -> Tensor:
    """Return the local tensor of the rank of the view; padding is zero.

    Args:
        whole: the logical tensor, of ``layout.shape``, which has the same shape on every rank.
        layout: how it is cut.
        view: the grid, and the coordinates of the rank.

    Returns:
        A new tensor of ``local_shape``.
    """
    local = whole.new_zeros(local_shape(layout, view))
    for box in local_boxes(layout, view):
        box.of_local(local).copy_(box.of_global(whole))
    return local


def gather_into(whole: Tensor, local: Tensor, layout: TensorLayout, view: GridView) -> None:
    """Write the blocks of one rank's local tensor to their places in the whole.

    Args:
        whole: the logical tensor, of shape ``layout.shape``; changed in place.
        local: the local tensor, of shape ``local_shape(layout, view)``.
        layout: how it is cut.
        view: the grid, and the coordinates of the rank.
    """
    for box in local_boxes(layout, view):
        box.of_global(whole).copy_(box.of_local(local))


def _within(boxes: list[Box], layout: TensorLayout, view: GridView) -> list[Box]:
    """The parts of ``boxes`` inside the layout's flat range."""
    flat = layout.flat
    assert flat is not None  # the caller looked
    size = {**view.sizes, **({flat.axes[0]: flat.block} if flat.block is not None else {})}
    cut = tuple((axis, size[axis]) for axis in flat.axes if axis in view.sizes)
    found = []
    for index, extent in flat_blocks(local_shape(layout, view), flat.start, flat.stop):
        for box in boxes:
            low = tuple(map(max, index, box.local))
            ends = [
                min(i + e, b + s)
                for i, e, b, s in zip(index, extent, box.local, box.shape, strict=True)
            ]
            shape = tuple(end - begin for end, begin in zip(ends, low, strict=True))
            if all(size > 0 for size in shape):
                moved = tuple(s + a - b for s, a, b in zip(box.start, low, box.local, strict=True))
                found.append(Box(low, moved, shape, (*box.parts, *cut)))
    return found


def _runs(layout: TensorLayout, dim: int, view: GridView) -> list[_Run]:
    length = layout.shape[dim]
    runs = [_Run(0, 0, length)]
    for shard in layout.shards:
        if shard.dim == dim:
            ranks, rank = view.sizes[shard.axis], view.coords[shard.axis]
            runs, length = _cut(runs, length, shard, ranks, rank)
    return runs


def _cut(
    runs: list[_Run], length: int, shard: Shard, ranks: int, rank: int
) -> tuple[list[_Run], int]:
    """Keep this rank's part of every chunk; returns the runs and the new local length."""
    chunks = _chunks(shard, length)
    kept: list[_Run] = []
    read = write = 0
    for chunk in chunks:
        piece = _piece(chunk, ranks, shard)
        parts = min(chunk.parts or ranks, ranks)
        begin = rank // (ranks // parts) * piece
        end = min(begin + piece, chunk.size)
        for run in runs:
            low = max(run.local, read + begin)
            high = min(run.local + run.size, read + end)
            if low < high:
                place = write + low - read - begin
                part = (*run.parts, (shard.axis, parts))
                kept.append(_Run(place, run.start + low - run.local, high - low, part))
        read += chunk.size
        write += piece
    return kept, write


def _chunks(shard: Shard, length: int) -> tuple[Chunk, ...]:
    """The chunks of a dimension of ``length`` elements."""
    chunks = (Chunk(length),) if shard.chunks is None else shard.chunks
    if sum(chunk.size for chunk in chunks) != length:
        raise ValueError(
            f"chunks {[c.size for c in chunks]} of dim {shard.dim} add up to "
            f"{sum(c.size for c in chunks)}, but the dimension has {length} elements"
        )
    return chunks


def _piece(chunk: Chunk, ranks: int, shard: Shard) -> int:
    """Local elements of a chunk on every rank."""
    whole = chunk.size + chunk.pad
    parts = chunk.parts or ranks
    if max(parts, ranks) % min(parts, ranks):
        raise ValueError(
            f"cannot place {parts} indivisible parts of dim {shard.dim} over {ranks} "
            f"{shard.axis} ranks: one number must divide the other"
        )
    if whole % parts:
        raise ValueError(
            f"cannot split dim {shard.dim} of size {whole} over {parts} "
            + (f"{shard.axis} ranks" if chunk.parts is None else "parts")
            + f": choose a number that divides it, or pad it (Chunk({chunk.size}, "
            f"pad={chunk.pad - whole % -parts}))"
        )
    return whole // min(parts, ranks)


def _slices(start: Shape, shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def view_of(tensor: Tensor, layout: TensorLayout, view: GridView, box: Box) -> Tensor:
    """Return a view of a box in a local tensor, or in the slice that a ``FlatSlice`` leaves.

    Args:
        tensor: the local tensor, of shape ``local_shape``; with a ``FlatSlice`` (stop - start,).
        layout, view, box: of the logical tensor, of the rank, and one of ``local_boxes``.
    """
    if layout.flat is None:
        return box.of_local(tensor)
    shape = local_shape(layout, view)
    step = tensor.stride(0)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum(i * stride for i, stride in zip(box.local, strides, strict=True))
    offset = tensor.storage_offset() + (first - layout.flat.start) * step
    return tensor.as_strided(box.shape, [stride * step for stride in strides], offset)
