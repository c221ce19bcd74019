"""The norm of the whole gradient, every logical element counted once, and clipping by it.

Shapes: T logical tensors of the whole model, W ranks of the mesh, P pipeline stages, S = W / P
ranks of a stage, K = ceil(T / S).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kenotron_dist import Axis, Mesh, all_gather, all_reduce, reduce_scatter
from kenotron_dist.boxes import Box, local_boxes, norm_weight, view_of
from kenotron_dist.gradients import coefficient_of, scale_to_norm
from kenotron_dist.placement import TensorLayout
from kenotron_optim.accumulate import GradAccumulator, Slices

INF = float("inf")
_ROW, _LARGE = 256, 1 << 18
"""Elements that are added up in fp32, of tensors from this many on: the error is below 1e-8."""


class GlobalNorm:
    """The norm of the gradient of a whole model.

    What each rank counts follows from placements and is worked out once, here. Every call is one
    pass over this rank's slices and two collectives of T numbers or fewer from each rank: a
    reduce-scatter over dp, cp and tp, whose ranks then hold the sums of K tensors each, and an
    all-gather of these over the mesh. Neither traffic nor kernels grow with the ranks of a stage.

    The powers of each logical tensor are added in fp64, over the ranks of a stage in the order of
    the backend (on gloo in a fixed tree), and the tensors in the order of their names. Other
    stages add exact zeros, so where the pipeline cuts the model changes no bit. One rank adds the
    powers of a tensor, so all ranks compute the same result from the same numbers.

    Args:
        accumulator: its slices are measured.
        norm_type: the exponent, 1, 2 or ``inf`` (the largest element).

    Raises:
        ValueError: another exponent.
    """

    def __init__(self, accumulator: GradAccumulator, norm_type: float = 2.0) -> None:
        if norm_type not in (1, 2, INF):
            raise ValueError(f"norm_type {norm_type} is not available: choose 1, 2 or inf")
        mesh = accumulator.mesh
        self.mesh, self.norm_type = mesh, float(norm_type)
        self.names = tuple(accumulator.names)
        """Logical names of the whole model, sorted."""
        self._layouts = {name: accumulator.owned_layout(name) for name in accumulator.logical}
        self._views: list[tuple[str, Box | None]] = []
        """Parts that this rank counts: a whole slice, or a box of it."""
        rows, places = [], []
        for name, layout in self._layouts.items():
            counted = list(_counted(layout, mesh))
            if counted:
                rows.append(self.names.index(name))
                places.append(range(len(self._views), len(self._views) + len(counted)))
                self._views += [(name, box) for box in counted]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=mesh.device)
        self._columns = _columns(places, len(self._views)).to(mesh.device)

    def __call__(self, slices: Slices) -> Tensor:
        """fp64 scalar, the same on every rank; ``slices`` come from ``finish``. Collective."""
        powers = self._powers(slices)
        if self.norm_type == INF:
            return powers.amax() if len(powers) else powers.sum()
        return powers.sum().pow(1 / self.norm_type)

    def norms(self, slices: Slices) -> dict[str, float]:
        """The norm of every parameter's gradient by logical name, the same on every rank.

        For reports: it waits for the numbers. Collective over the mesh.
        """
        powers = self._powers(slices)
        norms = powers if self.norm_type == INF else powers.pow(1 / self.norm_type)
        return dict(zip(self.names, norms.tolist(), strict=True))

    def by_rank(self, slices: Slices) -> Tensor:
        """Return what each rank counts of each tensor (W, T) fp64, the same on every rank.

        Sums of magnitudes or squares, or the largest magnitude. An entry is finite exactly when
        all that it counts is: no sum of fp32 squares reaches the end of fp64. For errors: it
        gathers W x T numbers. Collective over the mesh.
        """
        return all_gather(self._own(slices).unsqueeze(0), self.mesh.world)

    def _powers(self, slices: Slices) -> Tensor:
        """Powers of the logical tensors (T,) fp64, the same on every rank. Collective."""
        return self._reduce(self._own(slices))

    def _own(self, slices: Slices) -> Tensor:
        """Powers of what this rank counts of each logical tensor (T,) fp64."""
        row = torch.zeros(len(self.names), dtype=torch.float64, device=self.mesh.device)
        if self._views:
            # The last entry is the zero that fills up rows of fewer boxes.
            parts = _powers([self._view(slices, *view) for view in self._views], self.norm_type)
            total = parts[self._columns[0]]
            for column in self._columns[1:]:  # in a fixed order: atomics would have none
                other = parts[column]
                total = torch.maximum(total, other) if self.norm_type == INF else total + other
            row[self._rows] = total
        return row

    def _reduce(self, own: Tensor) -> Tensor:
        """Powers of the logical tensors (T,) from those of this rank (T,)."""
        world, count = self.mesh.world, len(self.names)
        if world.size == 1:
            return own
        if self.norm_type == INF:
            return largest_of(own, world)
        stage = self.mesh["dp", "cp", "tp"]
        each = -(-count // stage.size)  # K
        row = own.new_zeros(stage.size * each)
        row.narrow(0, 0, count).copy_(own)
        gathered = all_gather(reduce_scatter(row, stage), world)  # (W * K,); pp is outermost
        by_stage = gathered.reshape(self.mesh.sizes["pp"], stage.size * each)  # (P, S * K)
        return by_stage.sum(0).narrow(0, 0, count)

    def _view(self, slices: Slices, name: str, box: Box | None) -> Tensor:
        if box is None:
            return slices[name]
        layout = self._layouts[name]
        return view_of(slices[name], layout, self.mesh.view(layout), box)


def clip_(slices: Slices, max_norm: float, norm: Tensor | float) -> Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``.

    ``norm`` is a scalar, and so is what is returned. The coefficient is
    ``torch.nn.utils.clip_grad_norm_``'s: ``min(1, max_norm / (norm + 1e-6))``. A norm that is not
    finite makes the gradients so, as with torch (see ``find_nonfinite``). Raises ValueError unless
    ``max_norm`` is positive.
    """
    _check_bound(max_norm)
    return scale_to_norm(slices.values(), torch.as_tensor(norm), max_norm)


def clip_coefficient(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """Return the factor that bounds gradients of this norm by ``max_norm``; None: no bound.

    ``norm`` and the result are scalar tensors. The coefficient of ``clip_``, for an optimizer that
    multiplies by it itself.
    """
    if max_norm is None:
        return None
    _check_bound(max_norm)
    return coefficient_of(norm, max_norm)


def _check_bound(max_norm: float) -> None:
    if not max_norm > 0:
        raise ValueError(f"cannot clip to a norm of {max_norm}: it must be above 0")


def _powers(views: list[Tensor], norm_type: float) -> Tensor:
    """Sum of magnitudes or squares, or largest magnitude, of each view, and a zero; fp64."""
    zero = torch.zeros(1, dtype=torch.float64, device=views[0].device)
    if norm_type == INF:  # exact in any dtype; on a CPU 20 times as fast as a norm of order inf
        low, high = zip(*(view.aminmax() for view in views), strict=True)
        largest = torch.maximum(torch.stack(high), -torch.stack(low))
        return torch.cat([largest.double(), zero])
    if norm_type == 1:
        return torch.cat([_norms(views, 1.0), zero])
    rows = [_ROW * (view.numel() // _ROW) if _in_rows(view) else 0 for view in views]
    rest = [view[n:] if n else view for view, n in zip(views, rows, strict=True)]
    powers = _norms(rest, 2.0).square()
    large = [i for i, n in enumerate(rows) if n]
    if large:
        powers[large] += torch.stack([_squares(views[i][: rows[i]]) for i in large])
    return torch.cat([powers, zero])


def largest_of(own: Tensor, axis: Axis) -> Tensor:
    """Largest of the ranks' numbers, which are not negative; nan where one of them is nan.

    Elementwise over fp64 of any shape, the same on all ranks.

    Backends disagree about the maximum of a nan. The bits of numbers that are not negative are
    ordered as the numbers are, with nan after inf.
    """
    bits = own.masked_fill(own.isnan(), torch.nan).view(torch.int64)
    return all_reduce(bits, axis, op="max").view(torch.float64)


def _norms(views: list[Tensor], norm_type: float) -> Tensor:
    return torch.stack(torch._foreach_norm(views, norm_type, dtype=torch.float64))


def _in_rows(view: Tensor) -> bool:
    """On a CPU torch copies a tensor to take its norm in fp64: large ones go in short rows."""
    return view.device.type == "cpu" and view.ndim == 1 and view.numel() >= _LARGE


def _squares(flat: Tensor) -> Tensor:
    """Sum of squares of whole rows: fp32 within a row, fp64 between them.

    Where squares would leave the range of fp32, all is done in fp64.
    """
    norms = torch.linalg.vector_norm(flat.view(-1, _ROW), dim=1)
    total = norms.double().square().sum()
    if 1e-20 * len(norms) < total < 1e36 or not flat.any():
        return total
    return torch.linalg.vector_norm(flat, dtype=torch.float64).square()


def _counted(layout: TensorLayout, mesh: Mesh) -> Iterator[Box | None]:
    """Blocks of a slice that this rank counts; a single None for all of it."""
    flat = layout.flat
    assert flat is not None  # a slice's layout
    view = mesh.view(layout)
    own = [box for box in local_boxes(layout, view) if norm_weight(layout, view, box) > 0]
    counted = [box for box in own if box.numel]
    if counted and sum(box.numel for box in counted) == flat.stop - flat.start:
        yield None
    else:
        yield from counted


def _columns(places: Sequence[range], fill: int) -> Tensor:
    """Index the k-th part of each tensor (most parts, tensors); ``fill`` where it has fewer."""
    most = max((len(place) for place in places), default=0)
    table = [[place[k] if k < len(place) else fill for place in places] for k in range(most)]
    return torch.tensor(table, dtype=torch.int64)
