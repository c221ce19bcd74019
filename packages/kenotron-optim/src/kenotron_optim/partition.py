"""Which range of every parameter a data-parallel rank owns, and where it lies in a bucket.

A logical tensor's flattened local part (N elements) is cut in d ranges of ceil(N/d): rank r owns
range r, the last ones may be shorter or empty. Ranges are cut per parameter, so that neither
bucket sizes nor pipeline cuts move a boundary.

A bucket is a buffer (d, width): row r holds range r of each of its parameters, side by side. A
reduce-scatter of its rows gives every rank the sums of what it owns. A tensor that one rank owns
altogether lies in that rank's row alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    """Columns: ceil(N/d), or N where one rank owns it all."""
    owner: int | None = None
    """The rank that owns it all; None: every rank owns its range."""

    def owned(self, rank: int) -> tuple[int, int]:
        """Range of the flattened local tensor that ``rank`` owns; empty when start = stop."""
        if self.owner is not None:
            return (0, self.numel) if rank == self.owner else (0, 0)
        start = min(rank * self.size, self.numel)
        return start, min(start + self.size, self.numel)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype that are reduced together."""

    ranks: int
    dtype: torch.dtype
    """Of the parameters."""
    spans: tuple[Span, ...]
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
    cap_bytes: float,
    whole: Collection[str] = (),
) -> list[Bucket]:
    """Group parameters, in the order given, into buckets of one dtype and about ``cap_bytes``.

    A parameter is in one bucket: one larger than the cap has a bucket to itself. Those named in
    ``whole`` go to one rank each, in buckets of their own. Raises ValueError unless the cap is
    positive.
    """
    if cap_bytes <= 0:
        raise ValueError(f"a bucket of {cap_bytes} bytes holds nothing: give a positive size")
    cut = {name: x for name, x in parameters.items() if name not in whole}
    uncut = {name: x for name, x in parameters.items() if name in whole}
    return _cut_buckets(cut, ranks, cap_bytes) + _whole_buckets(uncut, ranks)


def _whole_buckets(parameters: Mapping[str, Tensor], ranks: int) -> list[Bucket]:
    """One bucket for each dtype; the largest tensors are dealt first, each to the emptiest rank."""
    found = []
    for dtype in dict.fromkeys(x.dtype for x in parameters.values()):
        filled = [0] * ranks
        spans = []
        alike = [(name, x.numel()) for name, x in parameters.items() if x.dtype == dtype]
        for name, numel in sorted(alike, key=lambda each: (-each[1], each[0])):
            owner = filled.index(min(filled))
            spans.append(Span(name, numel, filled[owner], numel, owner))
            filled[owner] += numel
        found.append(Bucket(ranks, dtype, tuple(spans)))
    return found


def _cut_buckets(parameters: Mapping[str, Tensor], ranks: int, cap_bytes: float) -> list[Bucket]:
    buckets: list[Bucket] = []
    spans: list[Span] = []
    dtype: torch.dtype | None = None
    filled = 0
    for name, parameter in parameters.items():
        size = -(-parameter.numel() // ranks)
        nbytes = size * ranks * parameter.element_size()
        if spans and (parameter.dtype != dtype or filled + nbytes > cap_bytes):
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
    if span.owner is not None:
        yield buffer[span.owner, span.offset : span.offset + span.size], slice(0, span.numel)
        return
    rows, rest = divmod(span.numel, span.size)
    columns = slice(span.offset, span.offset + span.size)
    if rows:
        yield buffer[:rows, columns], slice(0, rows * span.size)
    if rest:
        yield buffer[rows, span.offset : span.offset + rest], slice(rows * span.size, span.numel)


def write(buffer: Tensor, span: Span, values: Tensor) -> None:
    """Copy a parameter-shaped tensor into its place in a bucket, casting."""
    copy(list(blocks(buffer, span)), values)


def copy(places: Sequence[Place], values: Tensor) -> None:
    """Overwrite ``blocks`` by a parameter-shaped tensor, casting."""
    flat = values.reshape(-1)
    for view, part in places:
        view.copy_(flat[part].view_as(view))


def add(places: Sequence[Place], values: Tensor) -> None:
    """Add a parameter-shaped tensor onto its ``blocks``, in their dtype.

    It runs for every parameter and micro-batch: find the blocks once.
    """
    if len(places) == 1:  # all but parameters that the ranks do not divide
        view, _ = places[0]
        view.add_(values.reshape(view.shape))
        return
    flat = values.reshape(-1)
    for view, part in places:
        view.add_(flat[part].view_as(view))


def read(buffer: Tensor, span: Span, out: Tensor) -> None:
    """Copy a parameter from its place in a bucket into ``out`` (contiguous), casting."""
    flat = out.view(-1)
    for view, part in blocks(buffer, span):
        flat[part].view_as(view).copy_(view)


def _bucket(ranks: int, dtype: torch.dtype | None, spans: Sequence[Span]) -> Bucket:
    assert dtype is not None  # set with the first span
    return Bucket(ranks, dtype, tuple(spans))
