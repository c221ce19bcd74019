"""Check that ranks which should hold the same values do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kenotron_dist.axis import Axis
from kenotron_dist.collectives import all_gather, all_reduce
from kenotron_dist.grid import DATA_AXES
from kenotron_dist.mesh import Mesh
from kenotron_dist.placement import TensorLayout
from kenotron_dist.ranks import listed


def check_replicas(
    parameters: Mapping[str, Tensor], layouts: Mapping[str, TensorLayout], mesh: Mesh
) -> None:
    """Compare a checksum of every parameter over the ranks that hold the same part of it.

    Slices that each data rank has of its own are compared over the other axes. Replicas of single
    kv heads are not compared. Collective over the mesh; two small all-reduces an axis.

    Args:
        parameters: this stage's by name, of any shape.
        layouts: of the whole model.
        mesh: the mesh.

    Raises:
        ValueError: on all ranks of a group that disagrees; it names tensor, axis and ranks.
    """
    sums = {path: bit_sums(parameters[path]) for path in sorted(parameters)}
    for grid, data in DATA_AXES.items():
        own = [path for path in sums if layouts[path].grid == grid]
        if own:
            _compare([p for p in own if layouts[p].flat is None], sums, mesh[data])
            for axis in mesh.view(layouts[own[0]]).axes:
                if axis not in ("pp", *data):
                    _compare([p for p in own if not _is_cut(layouts[p], axis)], sums, mesh[axis])
    tied = {layout.name: layout for layout in layouts.values() if len(layout.stages) > 1}
    for name, layout in sorted(tied.items()):
        axis = mesh.subset("pp", layout.stages)
        if axis is not None:
            own = [path for path in sums if layouts[path].name == name]
            _compare(own[:1], sums, axis)  # none: a slice of no elements


def bit_sums(tensor: Tensor) -> Tensor:
    """Int64 (2,) from the bits of a tensor of any shape: equal where those are, on any device."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(-1).view(width)
    return torch.stack([bits.sum(dtype=torch.int64), bits[::2].sum(dtype=torch.int64)])


def check_equal(tensors: Mapping[str, Tensor], axis: Axis) -> None:
    """Compare checksums of tensors that must be equal over an axis; the same names on its ranks.

    They have any shape. Collective over the axis; raises as ``check_replicas`` does.
    """
    _compare(sorted(tensors), {name: bit_sums(tensor) for name, tensor in tensors.items()}, axis)


def _is_cut(layout: TensorLayout, axis: str) -> bool:
    return any(shard.axis == axis for shard in layout.shards)


def _compare(paths: list[str], sums: Mapping[str, Tensor], axis: Axis) -> None:
    if axis.size == 1 or not paths:
        return
    device = axis.control_device  # values in host memory have their checksum there
    own = torch.stack([sums[path].to(device) for path in paths])
    same = (all_reduce(own, axis, op="max") == all_reduce(own, axis, op="min")).all(-1).tolist()
    wrong = [path for path, equal in zip(paths, same, strict=True) if not equal]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {len(paths)} tensors that must be equal over {axis.name} "
            f"({listed(axis.ranks)}) differ, first {wrong[0]!r}"
            f"{_odd(sums[wrong[0]].to(device), axis)}: "
            "were all ranks given the same seed, config and checkpoint?"
        )


def _odd(own: Tensor, axis: Axis) -> str:
    """Return the ranks that have another value than most, where there is a most. Collective."""
    rows = [tuple(row) for row in all_gather(own[None], axis).view(axis.size, -1).tolist()]
    most = max(rows, key=rows.count)
    odd = [rank for rank, row in zip(axis.ranks, rows, strict=True) if row != most]
    if 2 * len(odd) >= axis.size:
        return ""
    return f" (on {listed(odd)})"
