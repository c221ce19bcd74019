"""Whole tensors of a training on many ranks, by logical name: gradients and weights.

Every rank lists the pieces that it holds; a process with the lists of all ranks joins them and
compares tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from kenotron_data import Batch
from kenotron_dist import Mesh
from kenotron_dist.boxes import local_boxes, view_of
from kenotron_engine.assembly import Records
from kenotron_engine.step import gradient
from kenotron_engine.training import Training
from kenotron_optim import Slices

GRADIENT_TOLERANCE = 1e-5
"""Largest deviation of a gradient, in its tensor's largest element; of losses and norms."""
GRADIENT_FLOOR = 1e-2
"""Share of that which is allowed, in the norm of all gradients, for tensors that hardly have
one."""

Piece = tuple[str, tuple[int, ...], np.ndarray, tuple[int, ...]]
"""(logical name, first index, values, global shape)."""
Whole = dict[str, np.ndarray]
"""Whole tensors by logical name, fp32."""


def gradients_of(training: Training, batch: Batch, step: int = 1) -> tuple[float, list[Piece]]:
    """Loss of the global batch, and this rank's pieces of its gradient, before clipping.

    Collective over the mesh; parameters do not change.
    """
    found = gradient(training, batch, step)
    return found.loss.item(), slice_pieces(training, found.slices)


def slice_pieces(training: Training, slices: Slices) -> list[Piece]:
    """Copies of what this rank owns of a gradient."""
    owned = {name: (part, training.grads.owned_layout(name)) for name, part in slices.items()}
    return pieces_of(owned, training.mesh)


def write_slices(training: Training, slices: Slices, whole: Whole) -> None:
    """Overwrite what this rank owns of a gradient with its part of whole tensors."""
    for name, slice_ in slices.items():
        layout = training.grads.owned_layout(name)
        view = training.mesh.view(layout)
        for box in local_boxes(layout, view):
            part = torch.from_numpy(whole[name][_place(box.start, box.shape)])
            view_of(slice_, layout, view, box).copy_(part)


def weight_pieces(training: Training) -> list[Piece]:
    """Copies of this rank's parameters."""
    return pieces_of(training.records(), training.mesh)


def pieces_of(records: Records, mesh: Mesh) -> list[Piece]:
    """Copies in fp32, without padding, of this rank's blocks of tensors."""
    return [
        (name, box.start, _copy(view_of(tensor, layout, mesh.view(layout), box)), layout.shape)
        for name, (tensor, layout) in records.items()
        for box in local_boxes(layout, mesh.view(layout))
    ]


def _copy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


def join_pieces(ranks: Iterable[list[Piece]], *, check: bool = True) -> Whole:
    """Whole tensors from the pieces of all ranks.

    Where ranks differ the first one counts, or with ``check`` ValueError names the tensor. Raises
    ValueError, too, for a tensor of which a part is missing.
    """
    whole: Whole = {}
    known: dict[str, np.ndarray] = {}
    for pieces in ranks:
        for name, start, values, shape in pieces:
            full = whole.setdefault(name, np.zeros(shape, np.float32))
            seen = known.setdefault(name, np.zeros(shape, np.bool_))
            place = _place(start, values.shape)
            again = seen[place]
            if check and not np.array_equal(full[place][again], values[again], equal_nan=True):
                raise ValueError(f"ranks that hold the same part of {name!r} do not agree")
            full[place] = np.where(again, full[place], values)
            seen[place] = True
    for name, seen in known.items():
        if not seen.all():
            raise ValueError(f"no rank has all of {name!r}: {int((~seen).sum())} elements missing")
    return whole


def replica_deviations(ranks: Iterable[list[Piece]], whole: Whole) -> dict[str, float]:
    """Largest |a - b| of every tensor between a rank's piece and the whole; nan is infinity."""
    found: dict[str, float] = {}
    for pieces in ranks:
        for name, start, values, _ in pieces:
            other = whole[name][_place(start, values.shape)]
            found[name] = max(found.get(name, 0.0), largest_difference(values, other))
    return found


def gradient_bounds(want: Whole, relative: float = GRADIENT_TOLERANCE) -> dict[str, float]:
    """Return the deviation that is allowed for every element of each gradient.

    ``relative`` of the tensor's largest element, at least a hundredth of it of the global norm.
    """
    norm = np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in want.values()))
    return {
        name: float(relative * max(np.abs(values).max(), GRADIENT_FLOOR * norm))
        for name, values in want.items()
    }


def gradient_deviations(got: Whole, want: Whole) -> dict[str, float]:
    """max|a - b| of every tensor in units of what is allowed: above 1 is too much.

    Raises ValueError when the names differ.
    """
    bounds, found = gradient_bounds(want), differences(got, want)
    return {name: found[name] / bounds[name] for name in want}


def differences(got: Whole, want: Whole) -> dict[str, float]:
    """max|a - b| of every tensor, in the order of ``want``. Raises ValueError when names differ."""
    if unpaired := sorted(set(got) ^ set(want)):
        raise ValueError(f"only one of two trainings has {', '.join(unpaired)}")
    return {name: largest_difference(got[name], values) for name, values in want.items()}


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """max|a - b|; infinity where one is nan or inf and the other another."""
    if np.array_equal(a, b):
        return 0.0
    with np.errstate(invalid="ignore"):
        most = np.abs(a.astype(np.float64) - b).max()
    return float(most) if np.isfinite(most) else float("inf")


def _place(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
