"""Routes on which a token reaches a rank once, and is copied there for each of its experts.

The receiver learns from one more, small all-to-all which choice each of its rows is. Gradients of
the copies are added there in the order of the choices, in fp32, and rounded; then the sums of the
ranks are added. So gradients of tokens equal those of ``ByChoice`` to rounding; nothing else
differs.

T tokens of a rank, S choices that it sends, R that it receives, U tokens that it sends, V tokens
that it receives, D features, n ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kenotron_dist import Axis, Handle, all_gather, all_to_all, reduce_scatter, to_device
from kenotron_ep.grouping import Grouping
from kenotron_ep.routes import RoutePair, leaving
from kenotron_ep.row_table import RowTable, add_rows, owner_table, with_zero_row


class Copies(NamedTuple):
    """Token, of those that arrive, that is in each row of this rank's experts."""

    index: Tensor
    """int64: token of each row grouped by expert, V where there is padding."""
    table: RowTable
    """Grouped rows of each token that arrives, in the order of its choices."""
    padded: bool

    def spread(self, tokens_VD: Tensor) -> Tensor:
        """Copy tokens (V, D) to the rows of their experts, (R, D) and padding."""
        source = with_zero_row(tokens_VD) if self.padded else tokens_VD
        return source.index_select(0, self.index)

    def add(self, grouped: Tensor) -> Tensor:
        """Add the rows of each token, (R, D) and padding, to (V, D)."""
        return add_rows(grouped, self.table)


class Sent(NamedTuple):
    """Choices that a rank sends."""

    axis: Axis
    tokens: int
    """T."""
    top_k: int
    choices_S: Tensor
    """``t * K + k``, by expert."""
    send: tuple[int, ...]
    receive: tuple[int, ...]
    grouping: Grouping
    tokens_of: tuple[int, ...]
    """T of every rank."""


@dataclass(frozen=True, eq=False)
class OncePerRank:
    """A token is sent once to each rank that has experts of it: one all-to-all each way.

    See ``RoutePair``: (U, D) are sent and (V, D) arrive.
    """

    axis: Axis
    tokens_U: Tensor
    """Tokens that are sent, by (rank, token)."""
    table: RowTable
    """Rows of each token among them, in the order of the ranks."""
    copies: Copies
    send: tuple[int, ...]
    receive: tuple[int, ...]

    def start(self, x_TD: Tensor) -> Handle:
        """Start an all-to-all."""
        rows = x_TD.index_select(0, self.tokens_U)
        return all_to_all(rows, self.axis, self.send, self.receive, async_op=True)

    def finish(self, arrived: Tensor) -> Tensor:
        """Copy tokens to their experts."""
        return self.copies.spread(arrived)

    def start_backward(self, grad_RD: Tensor) -> Handle:
        """Add the gradients of the copies; start an all-to-all."""
        rows = self.copies.add(grad_RD)
        return all_to_all(rows, self.axis, self.receive, self.send, async_op=True)

    def finish_backward(self, arrived: Tensor) -> Tensor:
        """Add what ranks return, in their order."""
        return add_rows(arrived, self.table)

    def leaving(self) -> tuple[int, int]:
        """Return tokens for others, and from others."""
        return leaving(self.axis, self.send), leaving(self.axis, self.receive)


@dataclass(frozen=True, eq=False)
class Gathered:
    """Every rank gets all tokens: an all-gather forward, a reduce-scatter backward.

    Where ranks have different numbers of tokens, all send as many as the one with the most. See
    ``RoutePair``: (V, D) arrive, where V is n times that many.
    """

    axis: Axis
    tokens: int
    """T."""
    longest: int
    """The largest T of a rank."""
    copies: Copies

    def start(self, x_TD: Tensor) -> Handle:
        """Start an all-gather."""
        if not self.longest:  # on every rank
            return Handle(None, x_TD)
        rows = pad(x_TD, (0, 0, 0, self.longest - self.tokens))
        return all_gather(rows, self.axis, 0, async_op=True)

    def finish(self, arrived: Tensor) -> Tensor:
        """Copy tokens to their experts."""
        return self.copies.spread(arrived)

    def start_backward(self, grad_RD: Tensor) -> Handle:
        """Add the gradients of the copies; start a reduce-scatter."""
        rows = self.copies.add(grad_RD)
        if not self.longest:
            return Handle(None, rows)
        return reduce_scatter(rows, self.axis, 0, async_op=True)

    def finish_backward(self, arrived: Tensor) -> Tensor:
        """Leave out the padding."""
        return arrived[: self.tokens]

    def leaving(self) -> tuple[int, int]:
        """Return tokens for others, twice: as many as the rank with the most has."""
        rows = (self.axis.size - 1) * self.longest
        return rows, rows


def shared_route(way: str, sent: Sent) -> RoutePair:
    """Make the route ``once_per_rank`` or ``allgather``; an all-to-all of choices over the axis."""
    axis, choices = sent.axis, sent.choices_S
    width = max(1, *sent.tokens_of)
    arrived = all_to_all(choices, axis, sent.send, sent.receive)
    ranks = torch.arange(axis.size, device=choices.device)
    sources = ranks.repeat_interleave(_on_device(sent.receive, choices), output_size=len(arrived))
    # The place of a row's token among all tokens of all ranks.
    places = sources * width + arrived // sent.top_k
    if way == "allgather":
        longest = max(sent.tokens_of)
        copies = _copies(sent, places, arrived % sent.top_k, axis.size * longest)
        return Gathered(axis, sent.tokens, longest, copies)
    ranks_S = ranks.repeat_interleave(_on_device(sent.send, choices), output_size=len(choices))
    _, tokens, send = _distinct(ranks_S * width + choices // sent.top_k, axis.size, width)
    index, _, receive = _distinct(places, axis.size, width)
    copies = _copies(sent, index, arrived % sent.top_k, sum(receive))
    rows = torch.arange(len(tokens), device=tokens.device)
    table = owner_table(rows, tokens, sent.tokens, len(tokens))
    return OncePerRank(axis, tokens, table, copies, send, receive)


def _copies(sent: Sent, tokens_R: Tensor, k_R: Tensor, arriving: int) -> Copies:
    """Make ``Copies`` from the token and the choice of each row, in the order of arrival."""
    grouping = sent.grouping
    assert grouping.index is not None and grouping.slots_R is not None  # there are several ranks
    index = torch.cat([tokens_R, tokens_R.new_full((1,), arriving)])[grouping.index]
    order = torch.argsort(tokens_R * sent.top_k + k_R, stable=True)
    table = owner_table(grouping.slots_R[order], tokens_R[order], arriving, grouping.rows)
    return Copies(index, table, grouping.padded)


def _distinct(places: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Number the distinct values among ``groups * width`` places.

    Returns:
        The number of each value; the distinct values modulo ``width``; how many there are in each
        group. The last one synchronises a device.
    """
    if places.is_meta:  # as many as there can be where groups have equally many
        counts = [min(len(places) // groups + 1, width)] * groups
        return places, places.new_empty(sum(counts)), tuple(counts)
    present = torch.zeros(groups * width, dtype=torch.bool, device=places.device)
    present[places] = True
    counts = present.view(groups, width).sum(1).tolist()
    numbers = present.cumsum(0) - 1
    return numbers[places], present.nonzero().view(-1) % width, tuple(counts)


def _on_device(counts: tuple[int, ...], like: Tensor) -> Tensor:
    return to_device(torch.tensor(counts), like.device)
