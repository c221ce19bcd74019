"""A whole parameter becomes this rank's part."""

from __future__ import annotations

from torch import Tensor, nn

from kenotron_dist import Axis, Shard, TensorLayout, local_shape
from kenotron_dist.boxes import scatter


def check_axis(axis: Axis) -> None:
    """Raise TypeError when a whole mesh, or the name of an axis, is given for an axis."""
    if not isinstance(axis, Axis):
        raise TypeError(f'axis is a {type(axis).__name__}: give one axis of a mesh, mesh["tp"]')


def cut_parameter(whole: Tensor, name: str, shard: Shard, axis: Axis) -> nn.Parameter:
    """This rank's part of ``whole`` as a parameter; on meta only its shape."""
    layout = TensorLayout(name, tuple(whole.shape), (shard,))
    sizes, coords = {axis.name: axis.size}, {axis.name: axis.rank}
    if whole.is_meta:
        return nn.Parameter(whole.new_empty(local_shape(layout, sizes)))
    return nn.Parameter(scatter(whole, layout, sizes, coords))
