"""Parameters that a plan cuts by their own name: stacked experts, and vectors of one entry a head.

Shapes: E experts, D hidden features, I features of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from kenotron_dist import Axis
from kenotron_dist.placement import Chunk, Shard
from kenotron_tp.cut import cut_parameter
from kenotron_tp.plan_names import Named
from kenotron_tp.planned_layers import PACKED_ROWS, SHARE, SUMMED, SUMS

_LAST = ("rowwise", PACKED_ROWS)
_TWO = ("packed_colwise", PACKED_ROWS)


def parameter_shard(shape: tuple[int, ...], style: str, axis: Axis) -> Shard:
    """Return the cut of a parameter: `colwise` cuts the dimension before the last.

    Of (E, 2 I, D) `packed_colwise` cuts both halves of 2 I, of (E, D, 2 I) `packed_rowwise` does;
    of a vector `colwise` cuts the only dimension.
    """
    dim = len(shape) - 1 if style in _LAST or len(shape) == 1 else len(shape) - 2
    pieces = 2 if style in _TWO else 1
    return Shard(axis.name, dim, (Chunk(shape[dim] // pieces),) * pieces)


def cut_named_parameter(owner: nn.Module, name: str, style: str, axis: Axis) -> Shard:
    """Give a module this rank's part of one of its parameters, and return the cut."""
    whole = owner._parameters[name]
    assert whole is not None
    shard = parameter_shard(tuple(whole.shape), style, axis)
    part = cut_parameter(whole.detach().clone(), name, shard, axis)
    part.requires_grad = whole.requires_grad
    owner.register_parameter(name, part)
    return shard


def parameter_problems(
    module: nn.Module, named: Mapping[str, Named], parents: Mapping[str, object], axis: Axis
) -> list[str]:
    """Return why parameters cannot be cut, or what would be wrong with the result.

    ``parents``: modules that have layers with cut output.
    """
    problems: list[str] = []
    summed = [path for path, each in named.items() if each.style in SUMS]
    for path, each in named.items():
        if not each.is_cut_parameter:
            continue
        shape = tuple(module.get_parameter(path).shape)
        problems += _size_problems(path, shape, each.style, axis)
        inside = any(path.startswith(f"{region}.") for region in summed)
        alone = len(shape) == 1 and path.rpartition(".")[0] in parents
        if not (inside or alone):
            problems.append(
                f"{path}: nothing adds up what ranks compute with their parts of it: give its "
                f"module {SUMS[0]}, or the whole parameter replicate"
            )
    for region in summed:
        problems += _inside_problems(module, region, named)
    for path, each in named.items():
        if each.style == SHARE and [*module.get_submodule(path).parameters()]:
            problems.append(
                f"{path}: it has parameters: {SHARE} is for a module without any, next to experts"
            )
    return problems


def _size_problems(path: str, shape: tuple[int, ...], style: object, axis: Axis) -> list[str]:
    if not isinstance(style, str) or len(shape) < 1 + (style in _LAST):
        return [f"{path}: style {style} cuts matrices, and this parameter has shape {list(shape)}"]
    shard = parameter_shard(shape, style, axis)
    pieces = len(shard.chunks or ())
    size = shape[shard.dim]
    if size % (pieces * axis.size) == 0:
        return []
    what = f"{pieces} pieces of dim {shard.dim}" if pieces > 1 else f"dim {shard.dim}"
    return [
        f"{path}: {what} of size {size} cannot be cut over {axis.size} ranks: choose a tp that "
        "divides it"
    ]


def _inside_problems(module: nn.Module, region: str, named: Mapping[str, Named]) -> list[str]:
    """Return parameters whose gradients or results would be wrong in a module that is summed."""
    problems = []
    if not [*module.get_submodule(region).parameters()]:
        problems.append(f"{region}: it has no parameters: its output is whole on every rank")
    for name, _ in module.get_submodule(region).named_parameters():
        each = named.get(f"{region}.{name}")
        if each is None or not (each.is_cut_parameter or each.style == SUMMED):
            problems.append(
                f"{region}.{name}: this parameter is in {region}, whose outputs are summed over "
                "ranks: give it colwise, rowwise or one of their packed kinds"
            )
    for path, each in named.items():
        if each.is_layer and path.startswith(f"{region}."):
            problems.append(
                f"{path}: it is cut as a layer, and {region} sums its output once more: leave one "
                "of the styles out"
            )
    return problems
