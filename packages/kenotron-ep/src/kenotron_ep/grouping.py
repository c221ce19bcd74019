"""Order of the rows on the rank of their experts: as they arrive, and grouped by expert.

Rows arrive by (source rank, expert, token, choice). Grouped they are by (expert, source rank,
token, choice): for each expert the order of all tokens, whatever the number of ranks.

R rows that arrive, n ranks, e experts of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_ep.row_table import with_zero_row


@dataclass(frozen=True, eq=False)
class Grouping:
    """Permutation between both orders, with padding where it is asked for."""

    rows: int
    """Rows of the buffer that is grouped by expert, padding included."""
    index: Tensor | None
    """int64 (rows,): row as it arrives, or R where there is padding; None: both orders are one."""
    slots_R: Tensor | None
    """int64: grouped place of each row that arrives; None: both orders are one."""
    padded: bool

    def by_expert(self, arrived_RD: Tensor) -> Tensor:
        """Group rows by expert: (rows, D), contiguous, zero where there is padding."""
        if self.index is None:
            return arrived_RD.contiguous()
        source = with_zero_row(arrived_RD) if self.padded else arrived_RD
        return source.index_select(0, self.index)

    def by_source(self, grouped: Tensor) -> Tensor:
        """Put grouped rows into the order of arrival: (R, D); padding is left out."""
        return grouped if self.slots_R is None else grouped.index_select(0, self.slots_R)


def group(counts_ne: Tensor, arriving: int, pad_to: int | None) -> Grouping:
    """Make the permutation from the number of rows of each source and expert.

    Args:
        counts_ne: int64 (n, e), rows that arrive from each rank for each expert of this rank.
        arriving: their sum, R.
        pad_to: rows of each expert in the grouped buffer; None: as many as arrive.
    """
    sources, experts = counts_ne.shape
    if pad_to is None and sources == 1:
        return Grouping(arriving, None, None, False)
    rows = arriving if pad_to is None else pad_to * experts
    device = counts_ne.device
    # A block has the rows of one source and one expert. Where it begins, in both orders:
    arrived = _starts(counts_ne.reshape(-1)).view(sources, experts)
    if pad_to is None:
        grouped = _starts(counts_ne.T.reshape(-1)).view(experts, sources).T
    else:
        grouped = counts_ne.cumsum(0) - counts_ne + torch.arange(experts, device=device) * pad_to
    shift = (grouped - arrived).reshape(-1)
    place = torch.arange(arriving, device=device)
    slots = place + shift.repeat_interleave(counts_ne.reshape(-1), output_size=arriving)
    index = place.new_full((rows,), arriving)
    index[slots] = place
    return Grouping(rows, index, slots, rows > arriving)


def _starts(counts: Tensor) -> Tensor:
    """Return where each of several ranges begins that follow one another."""
    return counts.cumsum(0) - counts
