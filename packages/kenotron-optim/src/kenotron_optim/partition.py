"""Range of every parameter that a data-parallel rank owns, and its place in a bucket.

A logical tensor's flattened local part (N elements) is cut in d ranges of ceil(N/d): rank r owns
range r, the last ones may be shorter or empty. Ranges are cut per parameter, so that neither
bucket sizes nor pipeline cuts move a boundary.

A bucket is a buffer (d, width): row r holds range r of each of its parameters, side by side. A
reduce-scatter of its rows gives every rank the sums of what it owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kenotron_dist.weight_products import Factors, add_product

HOST_BUCKET_BYTES = 25 * 2**20
"""Bytes of a bucket on a CPU."""
BUCKET_ELEMENTS, RANK_ELEMENTS = 40_000_000, 1_000_000
"""Elements of a bucket on an accelerator, and at least so many for each data rank: a
reduce-scatter of less is bound by its latency."""

PRODUCT_ROWS = 256
"""Least rows of a product for each data rank: tiles of an accelerator's kernels have 128 or 256."""

Place = tuple[Tensor, slice]
"""(view of a buffer, range of a flattened parameter's elements that it holds)"""


@dataclass(frozen=True)
class Span:
    """One parameter's place in a bucket."""

    name: str
    """Logical name."""
    numel: int
    """Elements of the local tensor, N."""
    offset: int
    """First column in the bucket."""
    size: int
    """Columns: ceil(N/d)."""

    def owned(self, rank: int) -> tuple[int, int]:
        """Range of the flattened local tensor that ``rank`` owns; empty when start = stop."""
        start = min(rank * self.size, self.numel)
        return start, min(start + self.size, self.numel)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype that are reduced together."""

    ranks: int
    dtype: torch.dtype
    """Of the parameters."""
    spans: tuple[Span, ...]
    axes: tuple[str, ...] = ("dp", "cp")
    """Axes of the mesh over which they are reduced; ``ranks`` is their size."""
    width: int = field(init=False)
    """Columns of the buffer."""

    def __post_init__(self) -> None:
        width = max((span.offset + span.size for span in self.spans), default=0)
        object.__setattr__(self, "width", width)

    def buffer(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A zero buffer (d, width)."""
        return torch.zeros(self.ranks, self.width, dtype=dtype, device=device)


def make_buckets(
    parameters: Mapping[str, Tensor],
    ranks: int,
    cap_bytes: float | None = None,
    axes: tuple[str, ...] = ("dp", "cp"),
) -> list[Bucket]:
    """Group parameters, in the order given, into buckets of one dtype and about ``cap_bytes``.

    They are reduced over ``axes`` of the mesh, which have ``ranks`` ranks.

    Without a cap a bucket has about ``HOST_BUCKET_BYTES`` on a CPU, elsewhere ``BUCKET_ELEMENTS``
    elements, or ``RANK_ELEMENTS`` for each rank where that is more.

    A parameter is in one bucket: one larger than the cap has a bucket to itself. Raises ValueError
    unless the cap is positive.
    """
    if cap_bytes is not None and cap_bytes <= 0:
        raise ValueError(f"a bucket of {cap_bytes} bytes holds nothing: give a positive size")
    buckets = _cut_buckets(parameters, ranks, cap_bytes)
    return [replace(bucket, axes=axes) for bucket in buckets]


def _cap_of(parameter: Tensor, ranks: int) -> float:
    """Bytes of a bucket of such parameters, where the caller gives none."""
    if parameter.device.type == "cpu":
        return HOST_BUCKET_BYTES
    return max(BUCKET_ELEMENTS, RANK_ELEMENTS * ranks) * parameter.element_size()


def _cut_buckets(
    parameters: Mapping[str, Tensor], ranks: int, cap_bytes: float | None
) -> list[Bucket]:
    buckets: list[Bucket] = []
    spans: list[Span] = []
    dtype: torch.dtype | None = None
    filled = 0
    for name, parameter in parameters.items():
        size = -(-parameter.numel() // ranks)
        nbytes = size * ranks * parameter.element_size()
        cap = _cap_of(parameter, ranks) if cap_bytes is None else cap_bytes
        if spans and (parameter.dtype != dtype or filled + nbytes > cap):
            buckets.append(_bucket(ranks, dtype, spans))
            spans, filled = [], 0
        offset = spans[-1].offset + spans[-1].size if spans else 0
        spans.append(Span(name, parameter.numel(), offset, size))
        dtype, filled = parameter.dtype, filled + nbytes
    if spans:
        buckets.append(_bucket(ranks, dtype, spans))
    return buckets


def blocks(buffer: Tensor, span: Span) -> Iterator[Place]:
    """Views of a parameter in a bucket's buffer, with the range of its elements they hold.

    Each view is 1-D or (rows, size), in element order: at most one of each kind, so that whole
    rows move in one strided operation.
    """
    if not span.size:
        return
    rows, rest = divmod(span.numel, span.size)
    columns = slice(span.offset, span.offset + span.size)
    if rows:
        yield buffer[:rows, columns], slice(0, rows * span.size)
    if rest:
        yield buffer[rows, span.offset : span.offset + rest], slice(rows * span.size, span.numel)


def write(buffer: Tensor, span: Span, values: Tensor) -> None:
    """Copy a tensor of the parameter's shape into its place in a bucket (d, width), casting."""
    copy(list(blocks(buffer, span)), values)


def shaped(places: list[Place], parameter: Tensor) -> list[Place]:
    """Give ``blocks`` that are one contiguous part the shape of the parameter."""
    if len(places) != 1 or not places[0][0].is_contiguous():
        return places
    view, part = places[0]
    return [(view.view(parameter.shape), part)]


def _aligned(places: Sequence[Place], values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair each block with the part of a parameter-shaped tensor that belongs there."""
    if len(places) == 1:  # all but parameters that the ranks do not divide
        view, _ = places[0]
        yield view, values if values.shape == view.shape else values.reshape(view.shape)
        return
    flat = values.reshape(-1)
    for view, part in places:
        yield view, flat[part].view_as(view)


def copy(places: Sequence[Place], values: Tensor) -> None:
    """Overwrite ``blocks`` by a tensor of the parameter's shape, casting."""
    for view, part in _aligned(places, values):
        view.copy_(part)


def add(places: Sequence[Place], values: Tensor) -> None:
    """Add a tensor of the parameter's shape onto its ``blocks``, in their dtype.

    It runs for every parameter and micro-batch: find the blocks once.
    """
    for view, part in _aligned(places, values):
        view.add_(part)


def matrices(places: Sequence[Place], parameter: Tensor) -> list[Place]:
    """Blocks of a matrix (O, I) as fp32 matrices, with the rows that they hold.

    Empty where there are none: for other shapes and buffers, where a block is no whole rows, and
    where it is so few of them that one product for each block is slower than a copy.
    """
    if parameter.ndim != 2 or not parameter.numel():
        return []
    width, found = parameter.shape[1], list[Place]()
    for view, part in places:
        pieces = [view] if view.is_contiguous() else list(view)
        start = (part.start or 0) // width
        for piece in pieces:
            if view.dtype != torch.float32 or piece.numel() % width:
                return []
            rows = piece.numel() // width
            found.append((piece.view(rows, width), slice(start, start + rows)))
            start += rows
    few = len(found) > 1 and len(found[0][0]) < PRODUCT_ROWS
    return [] if few else found


def add_products(places: Sequence[Place], products: Sequence[Factors], *, replaces: bool) -> None:
    """Add products dy^T x to the ``matrices`` of a parameter.

    Args:
        places: the matrices, and the rows that they hold.
        products: dy (T, O) and x (T, I) of each.
        replaces: whether the first one overwrites what is there.
    """
    for i, (dy, x) in enumerate(products):
        for view, rows in places:
            add_product(view, dy[:, rows].t(), x, replaces=replaces and not i)


def read(buffer: Tensor, span: Span, like: Tensor) -> Tensor:
    """Return a copy of a parameter from its place in a bucket, of the shape of ``like``."""
    out = torch.empty_like(like, dtype=buffer.dtype, memory_format=torch.contiguous_format)
    flat = out.view(-1)
    for view, part in blocks(buffer, span):
        flat[part].view_as(view).copy_(view)
    return out


def _bucket(ranks: int, dtype: torch.dtype | None, spans: Sequence[Span]) -> Bucket:
    assert dtype is not None  # set with the first span
    return Bucket(ranks, dtype, tuple(spans))
