"""Checks before gradients are accumulated: on one rank, and between ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from kenotron_dist import Axis, Mesh, gather_objects
from kenotron_dist.boxes import local_shape
from kenotron_dist.placement import TensorLayout
from kenotron_optim.partition import Bucket


def check_parameters(
    parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, TensorLayout], mesh: Mesh
) -> None:
    """Raise ValueError for a parameter without layout, of another shape, or not contiguous."""
    for given, called, make in (
        (parameters, "parameters", "named_parameters(module)"),
        (layouts, "layouts", "parameter_layouts(module, mesh.sizes)"),
    ):
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{called} is a {type(given).__name__}: give a mapping by name, kenotron_dist's "
                f"{make}"
            )
    unknown = sorted(set(parameters) - set(layouts))
    if unknown:
        raise ValueError(f"no layout for parameters {unknown}: layouts are of the whole model")
    for path, parameter in parameters.items():
        expected = local_shape(layouts[path], mesh.view(layouts[path]))
        if tuple(parameter.shape) != expected:
            raise ValueError(
                f"parameter {path!r} has shape {tuple(parameter.shape)}, but by its layout a rank "
                f"holds {expected}: make layouts from this model and mesh"
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"parameter {path!r} is not contiguous: give the module p.contiguous() before"
            )


def check_known(layouts: Mapping[str, TensorLayout], irregular: Collection[str]) -> None:
    """Raise ValueError for names that the model has not."""
    known = {layout.name for layout in layouts.values()}
    if unknown := sorted(set(irregular) - known):
        raise ValueError(f"irregular: the model has no tensors {unknown}: give logical names")


def frozen_ties(
    parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, TensorLayout], mesh: Mesh
) -> set[str]:
    """Logical names of tied tensors that do not learn, on any stage. Collective over pp.

    Raises ValueError on all ranks when a tied tensor is frozen under some names only.
    """
    own = [
        path for path, p in parameters.items()
        if not p.requires_grad and len(layouts[path].owners) > 1
    ]  # fmt: skip
    gathered = gather_objects(own, mesh["pp"]) if mesh["pp"].size > 1 else [own]
    frozen = {path for stage in gathered for path in stage}
    for path in sorted(frozen):
        learning = set(layouts[path].owners) - frozen
        if learning:
            raise ValueError(
                f"{path!r} is frozen, but it is tied to {min(learning)!r}, which is not: freeze "
                "all owners or none"
            )
    return {layouts[path].name for path in frozen}


def check_alike(described: Sequence[Sequence[Any]], axis: Axis) -> None:
    """Raise ValueError on all ranks of an axis when they describe their buckets differently."""
    if axis.size == 1:
        return
    first, *others = gather_objects([list(each) for each in described], axis)
    for rank, other in enumerate(others, 1):
        if other != first:
            pairs = [(a, b) for a, b in zip(first, other, strict=False) if a != b]
            a, b = pairs[0] if pairs else (len(first), len(other))
            raise ValueError(
                f"ranks {axis.ranks[0]} and {axis.ranks[rank]} of the same {axis.name} accumulate "
                f"different parameters, {a} and {b}: "
                "give every rank the same ones in the same order, and freeze the same ones"
            )


def check_order(axis: Axis, buckets: Sequence[Bucket], order: Sequence[tuple[int, int]]) -> None:
    """Raise ValueError on all ranks when sums of buckets started in different orders."""
    if axis.size == 1:
        return
    first, *others = gather_objects(list(order), axis)
    for rank, other in enumerate(others, 1):
        pairs = [(a, b) for a, b in zip(first, other, strict=True) if a != b]
        if pairs:
            a, b = (buckets[i].spans[-1].name for _, i in pairs[0])
            raise ValueError(
                f"ranks {axis.ranks[0]} and {axis.ranks[rank]} of the same {axis.name} got "
                f"gradients in different orders, {a!r} on one and {b!r} on the other: choose "
                "reduce='step', or give those that some rank does not use as irregular"
            )


def check_backwards(backwards: int | None) -> None:
    """Raise ValueError for a number of backward passes that is none."""
    if backwards is not None and (not isinstance(backwards, int) or backwards < 1):
        raise ValueError(f"backwards is {backwards!r}: give the number of backwards, from 1")


def check_count(
    path: str, count: int, backwards: int | None, *, is_open: bool, taken: bool
) -> None:
    """Raise RuntimeError where a parameter must get no further gradient.

    Args:
        path: name of the parameter.
        count: gradients that it got in this step.
        backwards: how many it may get; None: any number.
        is_open: whether a step has begun that is not finished.
        taken: whether the product of this backward pass was taken before.
    """
    if not is_open:
        raise RuntimeError(
            f"parameter {path!r} got a gradient after finish(): a step begins with start()"
        )
    if backwards is None:
        return
    if taken:
        raise RuntimeError(
            f"parameter {path!r}: the product of its gradient was already taken in this "
            "backward pass, in which it is used more than once: leave it out of take_products, "
            "or call start() without backwards"
        )
    if count >= backwards:
        raise RuntimeError(
            f"parameter {path!r} got gradient number {count + 1}, but "
            f"start(backwards={backwards}) promised at most {backwards}: its "
            "sum may be under way; give the number of backward passes, or none"
        )
