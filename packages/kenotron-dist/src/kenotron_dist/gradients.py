"""Complete the gradients of cut modules: the sums over ranks that their placements ask for.

A training loop of one's own calls ``sum_gradients`` after the last backward; kenotron-optim does
the same inside its reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kenotron_dist.boxes import gradient_sums
from kenotron_dist.collectives import all_reduce
from kenotron_dist.mesh import Axis, Mesh
from kenotron_dist.placement import parameter_layouts


def sum_gradients(module: nn.Module, mesh: Mesh) -> None:
    """Add up, in place, every ``.grad`` that is partial over ranks: one all-reduce for each group.

    These are the gradients of ``Partial`` parameters (norms and biases under sequence parallelism)
    and of blocks that several ranks hold (kv heads fewer than ranks). Sums over data-parallel
    ranks and over tied parameters are not among them. A parameter without a gradient counts as
    zero where its siblings on other ranks may have one. Collective over the mesh.
    """
    layouts = parameter_layouts(module, mesh.sizes)
    groups: dict[tuple[str, int], list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        for each in gradient_sums(layouts[name], mesh.sizes, mesh.coords):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            views = [box.of_local(parameter.grad) for box in each.boxes]
            groups.setdefault((each.axis, each.parts), []).extend(views)
    for (axis, parts), views in groups.items():
        sum_views(views, mesh.subaxis(axis, parts))


def sum_views(views: Sequence[Tensor], axis: Axis) -> None:
    """Replace tensors by their sums over the axis, in place, in one all-reduce.

    All ranks give tensors of the same shapes in the same order, and one dtype.
    """
    if not views:  # nothing but padding, here and on every rank of the axis
        return
    summed = all_reduce(torch.cat([view.reshape(-1) for view in views]), axis)
    for view, part in zip(views, summed.split([view.numel() for view in views]), strict=True):
        view.copy_(part.view_as(view))
