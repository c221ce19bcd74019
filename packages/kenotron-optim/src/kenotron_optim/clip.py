"""The norm of the whole gradient, every logical element counted once, and clipping by it."""

from __future__ import annotations

import torch
from torch import Tensor

from kenotron_dist import Box, Mesh, TensorLayout, all_reduce, local_boxes
from kenotron_dist.boxes import norm_weight, view_of
from kenotron_optim.accumulate import GradAccumulator, Slices


class GlobalNorm:
    """The 2-norm of the gradient of a whole model.

    What each rank counts follows from placements and is worked out once, here. ``__call__`` is
    collective over the mesh.

    The sum of squares of each logical tensor is taken in fp64, summed over the ranks that hold
    parts of it, and the tensors are added in the order of their names: where the pipeline cuts
    the model changes no bit.
    """

    def __init__(self, accumulator: GradAccumulator) -> None:
        mesh = accumulator.mesh
        self._mesh = mesh
        self._tensors = len(accumulator.names)
        index = {name: i for i, name in enumerate(accumulator.names)}
        rows = [index[name] for name in accumulator.logical]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=mesh.device)
        self._layouts = {name: accumulator.owned_layout(name) for name in accumulator.logical}
        self._counted = {name: _counted(layout, mesh) for name, layout in self._layouts.items()}
        self._within = mesh["dp", "cp", "tp"]

    def __call__(self, slices: Slices) -> Tensor:
        """fp64 scalar, the same on every rank; ``slices`` come from ``finish``."""
        squares = torch.zeros(self._tensors, dtype=torch.float64, device=self._mesh.device)
        own = [self._square(name, slices[name]) for name in self._layouts]
        if own:
            squares[self._rows] = torch.stack(own)
        squares = all_reduce(squares, self._within)
        squares = all_reduce(squares, self._mesh["pp"])  # other stages' entries add exact zeros
        return squares.sum().sqrt()

    def _square(self, name: str, slice_: Tensor) -> Tensor:
        """Sum of squares of what this rank counts of a slice."""
        counted = self._counted[name]
        if counted is None:
            return torch.linalg.vector_norm(slice_, dtype=torch.float64).square()
        layout = self._layouts[name]
        total = torch.zeros((), dtype=torch.float64, device=slice_.device)
        for box in counted:
            view = view_of(slice_, layout, self._mesh.sizes, box)
            total += torch.linalg.vector_norm(view, dtype=torch.float64).square()
        return total


def clip_(slices: Slices, max_norm: float, norm: Tensor) -> Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``.

    The coefficient is ``torch.nn.utils.clip_grad_norm_``'s: ``min(1, max_norm / (norm + 1e-6))``.
    Returns it. Raises ValueError unless ``max_norm`` is positive.
    """
    if not max_norm > 0:
        raise ValueError(f"cannot clip to a norm of {max_norm}: it must be above 0")
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    scale = coefficient.float()
    for slice_ in slices.values():
        slice_.mul_(scale)
    return coefficient


def _counted(layout: TensorLayout, mesh: Mesh) -> list[Box] | None:
    """Blocks of a slice that this rank counts; None: all of it."""
    flat = layout.flat
    assert flat is not None  # a slice's layout
    boxes = local_boxes(layout, mesh.sizes, mesh.coords)
    own = [box for box in boxes if norm_weight(layout, mesh.sizes, mesh.coords, box) > 0]
    return None if sum(box.numel for box in own) == flat.stop - flat.start else own
