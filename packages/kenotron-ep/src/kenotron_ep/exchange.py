"""Plan which rows ranks exchange, from the experts that each token has chosen.

T tokens of a rank, K choices of a token, E experts, n ranks, e = E / n experts of a rank, S rows
that a rank sends, R rows that it receives, c chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_dist import Axis, all_to_all
from kenotron_ep.grouping import Grouping, group
from kenotron_ep.routes import ByChoice, RoutePair
from kenotron_ep.row_table import RowTable, choice_table
from kenotron_ep.shared_tokens import Sent, shared_route

DispatchWay = Literal["alltoall", "once_per_rank", "allgather"]
"""Route of tokens to their experts.

``alltoall``: once for each choice. ``once_per_rank``: once for each rank with chosen experts.
``allgather``: every token to every rank, for K > n. Results come back by all-to-all in all three.
"""
_WAYS = ("alltoall", "once_per_rank", "allgather")


@dataclass(frozen=True, eq=False)
class Exchange:
    """Rows that each rank sends to each other. ``plan_exchange`` makes it."""

    axis: Axis
    experts: int
    """E."""
    tokens: int
    """T of this rank."""
    counts: Tensor
    """int64 (e,): rows of each expert of this rank in the grouped buffer, padding included; with
    ``by_source`` (n, e), those of each rank apart."""
    loads: tuple[int, ...]
    """Rows of each expert of this rank without padding."""
    send: tuple[int, ...]
    """Rows that this rank sends to each rank."""
    receive: tuple[int, ...]
    """Rows that it receives from each rank."""
    choices_S: Tensor
    """int64: the choice ``t * K + k`` of each row sent, by (expert, token, k)."""
    tokens_S: Tensor
    """int64: the token of each row sent."""
    table: RowTable
    """The row of each choice, in the order in which ``combine`` adds results."""
    grouping: Grouping
    """Order of the rows as they arrive, and grouped by expert."""
    route: RoutePair
    """Route of tokens, and of gradients on the way back."""

    @property
    def rows(self) -> int:
        """Rows of the buffer that is grouped by expert, padding included."""
        return self.grouping.rows


def plan_exchange(
    experts_TK: Tensor,
    experts: int,
    axis: Axis,
    *,
    way: DispatchWay = "alltoall",
    pad_to: int | None = None,
    by_source: bool = False,
) -> Exchange:
    """Plan ``dispatch`` and ``combine`` for one batch of tokens.

    One all-to-all of e + 1 numbers for each rank, and one of S numbers unless the way is
    ``alltoall``. A device is synchronised once, and a few times more for the other ways.

    Args:
        experts_TK: int64 (T, K), the chosen experts of each token of this rank, in 0..E-1, or -1
            for a choice that is dropped: it is not sent and adds 0. T may differ between ranks and
            be 0; K is the same on all ranks. A token may choose an expert twice.
        experts: E. Rank r of the axis has the experts from r * e to (r + 1) * e - 1.
        axis: the ranks over which experts are distributed.
        way: how tokens are sent; the same on all ranks. On one rank every way is ``alltoall``.
        pad_to: rows of each expert, so that all shapes are fixed except that of ``choices_S``;
            what is missing is filled with rows of zeros, which are neither sent nor returned.
        by_source: rows stay grouped by the rank that sent them, then by expert: each rank's are
            what its tokens alone would be. Not with ``pad_to``, nor another way than ``alltoall``.

    Returns:
        The plan. It may be used for several tensors.

    Raises:
        ValueError: a size, dtype or option that does not fit; an expert outside its range (on a
            CPU only: on other devices this is not checked, and the result is undefined); an expert
            with more than ``pad_to`` rows.
    """
    return plan_chunks([experts_TK], experts, axis, way, pad_to, by_source)[0]


def plan_chunks(
    parts: Sequence[Tensor],
    experts: int,
    axis: Axis,
    way: str,
    pad_to: int | None,
    by_source: bool = False,
    *,
    function: str = "plan_exchange",
) -> list[Exchange]:
    """Plan an exchange for each of several parts of the tokens, with one all-to-all of counts.

    ``parts`` are int64 (T, K), each of its own T; ``function`` is what the user called, for errors.
    """
    how = experts, axis, way, pad_to, by_source
    _check(parts, *how, function)
    choices = [_sorted(part, experts) for part in parts]
    counts = _exchange_counts(parts, choices, axis)
    for each in counts if pad_to is not None else ():
        _check_loads(each.loads, axis, pad_to, function)
    return [_plan(*each, *how) for each in zip(choices, counts, strict=True)]


class _Choices(NamedTuple):
    """Choices of some tokens, sorted."""

    tokens: int
    top_k: int
    order: Tensor
    """Choices by (expert, token, k), dropped ones first."""
    counts_E: Tensor


class _Counts(NamedTuple):
    """Numbers of rows of a part, on this rank."""

    arriving_ne: Tensor
    """From each rank for each expert of this rank."""
    send: tuple[int, ...]
    receive: tuple[int, ...]
    loads: tuple[int, ...]
    tokens_of: tuple[int, ...]
    """Tokens of every rank."""


def _sorted(experts_TK: Tensor, experts: int) -> _Choices:
    """Sort by expert; a stable sort keeps the order of tokens and choices."""
    found, order = torch.sort(experts_TK.reshape(-1), stable=True)
    each = torch.arange(experts + 1, device=found.device)
    counts = torch.searchsorted(found, each).diff()
    tokens, top_k = experts_TK.shape
    return _Choices(tokens, top_k, order, counts)


def _exchange_counts(
    parts: Sequence[Tensor], choices: Sequence[_Choices], axis: Axis
) -> list[_Counts]:
    """Tell each rank how many rows it gets, for all parts at once, and how many tokens there are.

    Afterwards both sides' numbers are on the host, by one copy.
    """
    n, c = axis.size, len(parts)
    rows = [F.pad(each.counts_E.view(n, -1), (0, 1), value=each.tokens) for each in choices]
    sent = torch.stack(rows, 1)  # (n, c, e + 1)
    arrived = all_to_all(sent, axis)
    if sent.is_meta:
        ours, theirs = _evenly(choices, len(parts), sent.shape[2] - 1, axis)
    else:
        ours, theirs = torch.stack([sent, arrived]).tolist()
    found = []
    for i in range(c):
        to = tuple(sum(row[i][:-1]) for row in ours)
        source = tuple(sum(row[i][:-1]) for row in theirs)
        loads = tuple(sum(row[i][e] for row in theirs) for e in range(len(theirs[0][i]) - 1))
        lengths = tuple(row[i][-1] for row in theirs)
        found.append(_Counts(arrived[:, i, :-1], to, source, loads, lengths))
    return found


def _evenly(
    choices: Sequence[_Choices], c: int, e: int, axis: Axis
) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """Rows to and from each rank for tensors without values: experts are chosen equally often."""
    experts, mine = axis.size * e, slice(axis.rank * e, (axis.rank + 1) * e)
    loads = []
    for part in choices:
        each, more = divmod(part.tokens * part.top_k, experts)
        loads.append([each + (expert < more) for expert in range(experts)])
    ours = [
        [[*loads[i][rank * e : (rank + 1) * e], choices[i].tokens] for i in range(c)]
        for rank in range(axis.size)
    ]
    return ours, [[[*loads[i][mine], choices[i].tokens] for i in range(c)]] * axis.size


def _plan(
    choices: _Choices,
    counts: _Counts,
    experts: int,
    axis: Axis,
    way: str,
    pad_to: int | None,
    by_source: bool,
) -> Exchange:
    tokens, top_k, order, _ = choices
    send, receive = counts.send, counts.receive
    choices_S = order[order.shape[0] - sum(send) :]
    tokens_S = choices_S // top_k
    table = choice_table(choices_S, tokens, top_k)
    by_rank = counts.arriving_ne.reshape(1, -1) if by_source else counts.arriving_ne
    grouping = group(by_rank, sum(receive), pad_to)  # as they arrive, where ranks stay apart
    if way == "alltoall" or axis.size == 1:
        route: RoutePair = ByChoice(axis, tokens_S, table, grouping, send, receive)
    else:
        sent = Sent(axis, tokens, top_k, choices_S, send, receive, grouping, counts.tokens_of)
        route = shared_route(way, sent)
    rows = counts.arriving_ne if by_source else counts.arriving_ne.sum(0)
    if pad_to is not None:
        rows = torch.full_like(rows, pad_to)
    return Exchange(
        axis, experts, tokens, rows, counts.loads, send, receive, choices_S, tokens_S, table,
        grouping, route,
    )  # fmt: skip


def _check_loads(loads: Sequence[int], axis: Axis, pad_to: int | None, function: str) -> None:
    """Raise ValueError where an expert of this rank has more than ``pad_to`` rows."""
    expert = loads.index(max(loads))
    if pad_to is not None and loads[expert] > pad_to:
        raise ValueError(
            f"{function}: expert {axis.rank * len(loads) + expert} has {loads[expert]} rows and "
            f"pad_to is {pad_to}: give at least {loads[expert]}, or drop choices first "
            "(within_capacity)"
        )


def _check(
    parts: Sequence[Tensor],
    experts: int,
    axis: Axis,
    way: str,
    pad_to: int | None,
    by_source: bool,
    function: str,
) -> None:
    """Raise ValueError for what does not fit."""
    if experts < 1 or experts % axis.size:
        raise ValueError(
            f"{function}: {experts} experts on {axis.size} {axis.name} ranks: each rank has "
            "equally many, at least one: change the number of experts or of ranks"
        )
    check_way(function, way)
    if pad_to is not None and pad_to < 1:
        raise ValueError(f"{function}: pad_to is {pad_to}, it must be at least 1")
    if by_source and (pad_to is not None or way != "alltoall"):
        raise ValueError(
            f"{function}: by_source was given with way {way!r} and pad_to {pad_to}: rows of each "
            "rank apart need the way alltoall and no pad_to"
        )
    for part in parts:
        if part.ndim != 2 or part.shape[1] == 0 or part.dtype != torch.int64:
            raise ValueError(
                f"{function}: experts are {tuple(part.shape)} of {part.dtype}: give (T, K) of "
                "torch.int64, with one choice or more"
            )
        if part.device.type != "cpu" or not part.numel():  # reading would synchronise a device
            continue
        least, most = map(int, part.aminmax())
        if least < -1 or most >= experts:
            wrong = least if least < -1 else most
            raise ValueError(
                f"{function}: expert {wrong} of {experts}: choices are from 0 to "
                f"{experts - 1}, or -1 for one that is dropped"
            )


def check_way(function: str, way: str) -> None:
    """Raise ValueError for an unknown way."""
    if way not in _WAYS:
        raise ValueError(f"{function}: way {way!r} is not {', '.join(_WAYS[:-1])} or {_WAYS[-1]}")
