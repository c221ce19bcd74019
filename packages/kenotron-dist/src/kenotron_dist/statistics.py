"""Mean, spread, extremes and norms of tensors that ranks hold in parts, the same on every rank.

A checksum of all of them tells whether any bit differs.

What is known of some numbers is a row of ``FIELDS`` fp64 numbers (*moments*). Rows of parts are
merged to the row of the whole, with central moments (Pebay, SAND2008-6212): nothing is lost where
a mean is large compared with the spread.

Shapes: N tensors, F = ``FIELDS``, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from kenotron_dist.boxes import local_boxes, norm_weight, view_of
from kenotron_dist.collectives import all_gather
from kenotron_dist.hashing import key
from kenotron_dist.mesh import Mesh
from kenotron_dist.objects import gather_objects
from kenotron_dist.placement import TensorLayout

__all__ = [
    "Statistics",
    "checksum",
    "merge",
    "moments",
    "no_moments",
    "statistics_of",
    "sum_moments",
    "tensor_moments",
]

FIELDS = 9
"""Count, mean, sums of (x - mean) to the 2nd, 3rd and 4th, sum of magnitudes, zeros, min, max."""
NEAR_ZERO = 1e-10
"""Magnitudes below this count as zeros."""
_CHUNK = 1 << 22
"""Elements that are looked at together: their fp64 copies are all the memory this takes."""


@dataclass(frozen=True)
class Statistics:
    """Statistics of the elements of a tensor; nan where an element is not finite."""

    mean: float
    std: float
    """Of a sample (n - 1); 0 of one element."""
    min: float
    max: float
    norm_l1: float
    """Sum of magnitudes."""
    norm_l2: float
    zero_frac: float
    """Share of elements whose magnitude is below 1e-10."""
    kurtosis: float
    """Above that of a normal distribution; 0 where nothing differs."""


def no_moments(device: torch.device | str = "cpu") -> Tensor:
    """The row (F,) of no element: what merging starts from."""
    row = torch.zeros(FIELDS, dtype=torch.float64, device=device)
    row[7], row[8] = math.inf, -math.inf
    return row


def moments(x: Tensor) -> Tensor:
    """The row (F,) of a tensor of any shape and dtype."""
    found = no_moments(x.device)
    for part in _parts(x.detach()):
        values = part.double()
        mean = values.mean()
        rest = values - mean
        squares = rest.square()
        sizes = values.abs()
        # Filled on the device: a copy from the host would wait for all that is queued there.
        count = torch.full((), values.numel(), dtype=torch.float64, device=x.device)
        powers = [squares.sum(), (squares * rest).sum(), squares.square().sum()]
        others = [sizes.sum(), (sizes < NEAR_ZERO).sum().double(), values.min(), values.max()]
        found = merge(found, torch.stack([count, mean, *powers, *others]))
    return found


def merge(a: Tensor, b: Tensor) -> Tensor:
    """Rows (..., F) of two parts to those of both together."""
    n1, mean1, s1, c1, q1, size1, zero1, low1, high1 = a.unbind(-1)
    n2, mean2, s2, c2, q2, size2, zero2, low2, high2 = b.unbind(-1)
    n = n1 + n2
    each = n.clamp_min(1)
    shift = mean2 - mean1
    step = shift / each
    product = n1 * n2
    mean = mean1 + step * n2
    s = s1 + s2 + shift * step * product
    c = c1 + c2 + shift * step**2 * product * (n1 - n2) + 3 * step * (n1 * s2 - n2 * s1)
    q = q1 + q2 + shift * step**3 * product * (n1**2 - product + n2**2)
    q = q + 6 * step**2 * (n1**2 * s2 + n2**2 * s1) + 4 * step * (n1 * c2 - n2 * c1)
    low, high = torch.minimum(low1, low2), torch.maximum(high1, high2)
    return torch.stack([n, mean, s, c, q, size1 + size2, zero1 + zero2, low, high], -1)


def sum_moments(rows: Tensor, mesh: Mesh) -> Tensor:
    """Rows (N, F) of this rank's parts to those of all ranks' parts, the same on every rank.

    Collective over the mesh. Every element must be in the row of one rank only.
    """
    gathered = all_gather(rows.unsqueeze(0), mesh.world)
    return reduce(merge, gathered.unbind(0))


def tensor_moments(
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, TensorLayout],
    names: Sequence[str],
    mesh: Mesh,
) -> Tensor:
    """Rows (N, F) of whole logical tensors, each element counted once, padding not at all.

    Collective over the mesh.

    Args:
        tensors: this rank's local tensors, any shape (1-D where a layout has a ``FlatSlice``).
        layouts: theirs, by logical name.
        names: of all N tensors of the model, in the same order on every rank.
        mesh: the mesh.

    Raises:
        KeyError: ``names`` does not have a tensor.
    """
    rows = no_moments(mesh.device).repeat(len(names), 1)
    place = {name: i for i, name in enumerate(names)}
    for name, tensor in tensors.items():
        layout = layouts[name]
        view = mesh.view(layout)
        boxes = local_boxes(layout, view)
        own = [box for box in boxes if norm_weight(layout, view, box) > 0]
        parts = [view_of(tensor.detach(), layout, view, box) for box in own if box.numel]
        rows[place[name]] = reduce(merge, map(moments, parts), rows[place[name]])
    return sum_moments(rows, mesh)


def statistics_of(row: Sequence[float]) -> Statistics:
    """Statistics of a row (F,); zeros for that of no element."""
    count, mean, squares, _, fourth, size, zeros, low, high = row
    if not count:
        return Statistics(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    variance = squares / max(count - 1, 1)
    kurtosis = fourth / count / variance / variance - 3 if variance else 0.0
    return Statistics(
        mean, math.sqrt(variance), low, high, size, math.sqrt(squares + count * mean * mean),
        zeros / count, kurtosis,
    )  # fmt: skip


def checksum(records: Mapping[str, tuple[Tensor, TensorLayout]], mesh: Mesh) -> str:
    """Return 32 hexadecimal digits of whole logical tensors, the same on every rank and layout.

    Names and all elements count, each once, padding not at all; the order of a tensor's elements
    does not. Collective over the mesh.

    Args:
        records: this rank's local tensors, any shape, and their layouts, whose names count.
        mesh: the mesh.
    """
    sums = {}
    for tensor, layout in records.values():
        view = mesh.view(layout)
        own = [b for b in local_boxes(layout, view) if b.numel and norm_weight(layout, view, b) > 0]
        held = tensor.detach()
        if parts := [_bit_sum(view_of(held, layout, view, box)) for box in own]:
            sums[layout.name] = torch.stack(parts).sum()
    values = torch.stack([*sums.values()]).tolist() if sums else []
    whole = dict[str, int]()
    for found in gather_objects(dict(zip(sums, values, strict=True)), mesh.world):
        for name, value in found.items():
            whole[name] = (whole.get(name, 0) + value) % 2**64
    return f"{key(*(part for pair in sorted(whole.items()) for part in pair)):032x}"


def _bit_sum(x: Tensor) -> Tensor:
    """Return a number (), int64, of the bits of elements in any order; sums of parts are sums."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in _parts(x):
        bits = part.contiguous().view(kind).long()
        total += ((bits ^ (bits << 21)) * bits + bits).sum()  # modulo 2**64
    return total


def _parts(x: Tensor) -> Iterable[Tensor]:
    """Pieces of at most about ``_CHUNK`` elements; none of a tensor without elements."""
    if not x.numel():
        return ()
    if x.ndim == 0:
        return (x,)
    rows = max(1, _CHUNK * x.shape[0] // x.numel())
    return x.split(rows)
