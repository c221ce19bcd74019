"""Complete and clip the gradients of cut modules, as their placements ask for.

A training loop of one's own calls ``sum_gradients`` after the last backward, then
``clip_gradients``; kenotron-optim does the same inside its reduction, on slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kenotron_dist.axis import Axis
from kenotron_dist.boxes import gradient_sums, local_boxes, norm_weight
from kenotron_dist.collectives import all_reduce
from kenotron_dist.mesh import Mesh
from kenotron_dist.placement import TensorLayout, parameter_layouts
from kenotron_dist.placement_kinds import Tie

__all__ = [
    "clip_gradients",
    "coefficient_of",
    "scale_by",
    "scale_to_norm",
    "sum_gradients",
    "sum_views",
]


def sum_gradients(module: nn.Module, mesh: Mesh) -> None:
    """Add up, in place, every ``.grad`` that is partial over ranks: one all-reduce for each group.

    These are the gradients of ``Partial`` parameters (norms and biases under sequence parallelism)
    and of blocks that several ranks hold (kv heads fewer than ranks). Sums over data-parallel
    ranks and over tied parameters are not among them. A parameter without a gradient counts as
    zero where its siblings on other ranks may have one. Collective over the mesh.
    """
    layouts = _layouts(module, mesh)
    groups: dict[tuple[str, int], list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        for each in gradient_sums(layouts[name], mesh.view(layouts[name])):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            views = [box.of_local(parameter.grad) for box in each.boxes]
            groups.setdefault((each.axis, each.parts), []).extend(views)
    for (axis, parts), views in groups.items():
        sum_views(views, mesh.subaxis(axis, parts))


def clip_gradients(
    module: nn.Module, mesh: Mesh, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale every ``.grad`` in place so that their norm is at most ``max_norm``; the norm before.

    ``torch.nn.utils.clip_grad_norm_`` of the whole model, with its coefficient
    ``min(1, max_norm / (norm + 1e-6))``: every logical element is counted once, whatever is cut
    or replicated. ``norm_type`` is the exponent, ``inf`` for the largest element. Gradients are
    complete: summed (``sum_gradients``), and over data-parallel ranks. With pp, ``module`` is this
    rank's stage. One all-reduce of a number over the mesh. Returns an fp64 scalar, the same on
    every rank. Raises ValueError when ``max_norm`` or ``norm_type`` is not positive, or a
    placement ties a parameter.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not value > 0:
            raise ValueError(f"clip_gradients: {name} {value} must be above 0")
    layouts, largest = _layouts(module, mesh), norm_type == float("inf")
    tied = [n for n, of in layouts.items() if any(isinstance(p, Tie) for p in of.placement)]
    if tied:
        raise ValueError(
            f"parameters {', '.join(tied)} are tied by placements: kenotron-optim adds and clips "
            "the gradients of their owners"
        )
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    views = {name: mesh.view(layouts[name]) for name in grads}
    norms = [
        torch.linalg.vector_norm(box.of_local(grad), norm_type, dtype=torch.float64)
        for name, grad in grads.items()
        for box in local_boxes(layouts[name], views[name])
        if box.numel and norm_weight(layouts[name], views[name], box)
    ]
    own = torch.stack([torch.zeros((), dtype=torch.float64, device=mesh.device), *norms])
    if largest:
        norm = all_reduce(own.max(), mesh.world, op="max")
    else:
        norm = all_reduce(own.pow(norm_type).sum(), mesh.world).pow(1 / norm_type)
    scale_to_norm(grads.values(), norm, max_norm)
    return norm


def scale_to_norm(tensors: Iterable[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    """Scale tensors (any shape) in place, from ``norm`` to ``max_norm`` if they are longer.

    ``norm`` is a scalar tensor. Returns the coefficient, a scalar too. It is
    ``torch.nn.utils.clip_grad_norm_``'s: ``min(1, max_norm / (norm + 1e-6))``.
    """
    coefficient = coefficient_of(norm, max_norm)
    scale_by(tensors, coefficient)
    return coefficient


def coefficient_of(norm: Tensor, max_norm: float) -> Tensor:
    """Return ``min(1, max_norm / (norm + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_`` does.

    ``norm`` and the result are scalar tensors.
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_by(tensors: Iterable[Tensor], coefficient: Tensor) -> None:
    """Multiply tensors in place by a scalar tensor."""
    scaled = list(tensors)
    on_host = coefficient.device.type == "cpu"  # reading a CPU scalar waits for nothing
    if scaled and not (on_host and coefficient == 1.0):
        torch._foreach_mul_(scaled, coefficient.float())


def _layouts(module: nn.Module, mesh: Mesh) -> dict[str, TensorLayout]:
    """Layouts of what this rank's stage holds."""
    return parameter_layouts(module, mesh.axis_sizes, lambda name: mesh.coords["pp"])


def sum_views(views: Sequence[Tensor], axis: Axis) -> None:
    """Replace tensors by their sums over the axis, in place, in one all-reduce.

    All ranks give tensors of the same shapes in the same order, and one dtype.
    """
    if not views:  # nothing but padding, here and on every rank of the axis
        return
    summed = all_reduce(torch.cat([view.reshape(-1) for view in views]), axis)
    for view, part in zip(views, summed.split([view.numel() for view in views]), strict=True):
        view.copy_(part.view_as(view))
