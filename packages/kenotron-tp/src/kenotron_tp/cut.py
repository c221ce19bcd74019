"""A whole parameter becomes this rank's part."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from kenotron_dist import Axis, GridView
from kenotron_dist.boxes import local_shape, scatter
from kenotron_dist.placement import Placements, Shard, TensorLayout

Cut = TypeVar("Cut", bound=nn.Module)


def check_axis(axis: Axis) -> None:
    """Raise TypeError when a whole mesh, or the name of an axis, is given for an axis."""
    if not isinstance(axis, Axis):
        raise TypeError(f'axis is a {type(axis).__name__}: give one axis of a mesh, mesh["tp"]')


def cut_parameter(whole: Tensor, name: str, shard: Shard, axis: Axis) -> nn.Parameter:
    """This rank's part of ``whole``, of any shape, as a parameter; on meta only its shape."""
    layout = TensorLayout(name, tuple(whole.shape), (shard,))
    view = GridView({axis.name: axis.size}, {axis.name: axis.rank})
    if whole.is_meta:
        return nn.Parameter(whole.new_empty(local_shape(layout, view)))
    return nn.Parameter(scatter(whole, layout, view))


def take_parts(made: Cut, whole: nn.Module, axis: Axis, placements: Placements) -> Cut:
    """Give a cut module on meta its parts of a whole module's parameters of the same names.

    They are copies, on the whole module's device; frozen ones stay frozen.
    """
    for name, parameter in whole.named_parameters():
        shard, values = placements.get(name), parameter.detach()
        part = nn.Parameter(values.clone())
        if isinstance(shard, Shard):
            part = cut_parameter(values.clone(), name, shard, axis)
        setattr(made, name, part.requires_grad_(parameter.requires_grad))
    return made
