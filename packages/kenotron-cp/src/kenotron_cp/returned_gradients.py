"""Return gradients of keys to the ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from kenotron_cp.block_backward import BlockBackward
from kenotron_cp.problem import Problem
from kenotron_dist import Axis, Handle, all_to_all


class Returned(NamedTuple):
    """Gradients under way."""

    handle: Handle
    names: list[tuple[int, int]]
    """(chunk of keys, chunk of queries) of each row that arrives."""

    def keep(self, work: BlockBackward) -> None:
        """Wait for them, and add them to those of this rank's keys."""
        for (m, x), row in zip(self.names, self.handle.wait().unbind(), strict=True):
            work.keep(m, x, row)


class Leaving(NamedTuple):
    """Gradients of other ranks' keys."""

    rows: Tensor
    send: list[int]
    """Rows for each rank."""
    coming: list[list[tuple[int, int]]]
    """(chunk of keys, chunk of queries) of the rows from each rank."""

    def start(self, axis: Axis) -> Returned:
        """Start the all-to-all that returns them."""
        receive = [*map(len, self.coming)]
        handle = all_to_all(self.rows, axis, self.send, receive, async_op=True)
        return Returned(handle, [name for names in self.coming for name in names])


def turns(p: Problem, ranks: int, offset: int) -> int:
    """Most pairs of chunks whose gradients a rank returns to the one ``offset`` places behind."""
    return max(len(p.table.returned(r, (r - offset) % ranks)) for r in range(ranks))


def differentiate(
    p: Problem,
    axis: Axis,
    work: BlockBackward,
    chunks: Mapping[int, Tensor],
    offset: int | None = None,
    turn: int | None = None,
) -> Leaving:
    """Differentiate chunks of other ranks' keys.

    Args:
        p: the problem.
        axis: the ranks over which the sequence is cut.
        work: the backward pass.
        chunks: keys and values by chunk, (B, K, tokens, D + V).
        offset: of the rank as many places behind only, which then sends nothing but to the one as
            many ahead; None: of all others.
        turn: only that number of each rank's pairs of chunks, see ``turns``; None: all pairs.
    """
    some = slice(None) if turn is None else slice(turn, turn + 1)
    me, ranks = axis.rank, range(axis.size)
    targets = [r for r in ranks if r != me] if offset is None else [(me - offset) % axis.size]
    sources = [r for r in ranks if r != me] if offset is None else [(me + offset) % axis.size]
    leaving = [p.table.returned(me, r)[some] if r in targets else [] for r in ranks]
    coming = [p.table.returned(r, me)[some] if r in sources else [] for r in ranks]
    made = [name for names in leaving for name in names]
    rows = work.zeros(len(made))
    for (m, x), row in zip(made, rows.unbind(), strict=True):
        work.over(m, x, chunks[m], row)
    return Leaving(rows, [*map(len, leaving)], coming)
