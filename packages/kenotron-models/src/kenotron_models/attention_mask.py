"""Earlier tokens that a token attends to: in its row, its document, its window.

What a token sees is always one piece of its row that ends with itself, so the first place of that
piece says everything; masks and lengths follow from it, each made once per micro-batch.

Shapes: B rows, S tokens of a row. A place is a token's number in its row, from 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenotron_dist import to_device
from kenotron_models.context import Context


class DocumentLengths(NamedTuple):
    """The documents of a micro-batch one after the other, as attention kernels read them."""

    begins: Tensor
    """First token of each document among all B * S, then B * S; int32."""
    longest: int
    """Tokens of the longest document."""


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """The tokens that each token of a micro-batch attends to, in layers of one kind."""

    context: Context
    window: int | None = None
    """Tokens that a token sees, itself counted, in places of the row; None: no bound."""
    documents: bool = False
    """A token sees its own document only."""

    @property
    def sequence(self) -> int:
        """S."""
        return self.context.positions_BS.shape[1]

    @property
    def whole(self) -> bool:
        """Every token sees all of its row up to itself: no mask is needed."""
        return self.first_BS is None

    @property
    def first_BS(self) -> Tensor | None:
        """First place that each token sees, int64, (1, S) if rows are equal; None: 0 for all."""
        return self._once("first", self._first)

    @property
    def mask_BSS(self) -> Tensor | None:
        """True where a query (dim 1) sees a key (dim 2), (1, S, S) if rows are equal; or None."""
        return self._once("mask", self._mask)

    @property
    def full_mask_BSS(self) -> Tensor:
        """As ``mask_BSS``, also where all that is hidden is the future."""
        return self._once("full mask", self._full_mask)

    @property
    def lengths(self) -> DocumentLengths:
        """Lengths of the documents, or of the rows where a token sees all documents of its row."""
        return self._once("lengths", self._lengths)

    def blocks(self, size: int) -> list[list[tuple[int, int]]]:
        """For every ``size`` queries of every row (one row if equal): the first place that the
        first of them sees, and the first that the last of them sees."""
        return self._once(("blocks", size), lambda: self._blocks(size))

    def _once(self, what: Any, make: Callable[[], Any]) -> Any:
        return self.context.once(("sight", self.window, self.documents, what), make)

    def _starts(self) -> Tensor | None:
        on_host = self.context.host_positions_BS
        if on_host is not None and not self.context.once(
            "several documents", lambda: starts_of(on_host).any()
        ):
            return None
        starts = self.context.once("document starts", lambda: document_starts(self.context))
        if starts.device.type == "cpu" and not starts.any():
            return None
        return starts

    def _first(self) -> Tensor | None:
        sequence = self.sequence
        starts = self._starts() if self.documents else None
        if self.window is None or self.window >= sequence:
            return starts
        places = torch.arange(sequence, device=self.context.positions_BS.device)
        first = (places - self.window + 1).clamp(min=0)[None]
        return first if starts is None else torch.maximum(first, starts)

    def _mask(self) -> Tensor | None:
        return None if self.first_BS is None else self.full_mask_BSS

    def _full_mask(self) -> Tensor:
        places = torch.arange(self.sequence, device=self.context.positions_BS.device)
        mask = (places <= places[:, None])[None]
        return mask if self.first_BS is None else mask & (places >= self.first_BS[:, :, None])

    def _lengths(self) -> DocumentLengths:
        positions = self.context.positions_BS
        batch, sequence = positions.shape
        if not self.documents:
            ends = torch.arange(batch + 1, dtype=torch.int32, device=positions.device) * sequence
            return DocumentLengths(ends, sequence)
        on_host = self.context.host_positions_BS
        begins, longest = document_lengths(positions if on_host is None else on_host)
        return DocumentLengths(to_device(begins, positions.device), longest)

    def _blocks(self, size: int) -> list[list[tuple[int, int]]]:
        sequence = self.sequence
        begins = range(0, sequence, size)
        if self.first_BS is None:
            return [[(0, 0) for _ in begins]]
        first_BS = self._on_host().first_BS
        assert first_BS is not None  # the same mask
        first = first_BS[:, list(begins)].tolist()
        last = first_BS[:, [min(begin + size, sequence) - 1 for begin in begins]].tolist()
        return [list(zip(*row, strict=True)) for row in zip(first, last, strict=True)]

    def _on_host(self) -> AttentionMask:
        """The same on the host, where positions are there or do not matter: no device waits."""
        positions = self.context.host_positions_BS
        if not self.documents:
            positions = torch.empty(1, self.sequence, dtype=torch.int64, device="cpu")
        if positions is None:
            return self
        return AttentionMask(Context(positions), self.window, self.documents)


def document_lengths(positions_BS: Tensor) -> DocumentLengths:
    """Return the documents of a micro-batch, of its positions (B, S), whose values it reads."""
    starts = starts_of(positions_BS)
    batch, sequence = starts.shape
    places = torch.arange(sequence, device=starts.device)
    begins = (starts == places).flatten().nonzero().flatten()
    ends = torch.cat([begins, begins.new_full((1,), batch * sequence)])
    return DocumentLengths(ends.int(), int(ends.diff().max()))


def document_starts(context: Context) -> Tensor:
    """Place (B, S), int64, where each token's document begins.

    One begins at a row's first token and wherever a position is not the former one plus 1.
    """
    return starts_of(context.positions_BS)


def starts_of(positions: Tensor) -> Tensor:
    """Return the same of positions (B, S) of whole rows."""
    places = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    goes_on = positions[:, 1:] == positions[:, :-1] + 1
    starts = torch.zeros_like(places)
    starts[:, 1:] = places[:, 1:].masked_fill(goes_on, 0)
    return starts.cummax(1).values
