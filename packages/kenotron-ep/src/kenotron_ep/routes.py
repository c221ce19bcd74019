"""Routes of tokens to the ranks of their experts, and of gradients back.

T tokens of a rank, S rows that it sends, R rows that it receives, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kenotron_dist import Axis, Handle, all_to_all
from kenotron_ep.grouping import Grouping
from kenotron_ep.row_table import RowTable, add_rows


class RoutePair(Protocol):
    """Two communications, each in two steps: what follows them is computed after a wait.

    How many rows (rows, D) arrive depends on the route.
    """

    def start(self, x_TD: Tensor) -> Handle:
        """Start sending tokens (T, D)."""
        ...

    def finish(self, arrived: Tensor) -> Tensor:
        """Return the rows of this rank's experts, (R, D) and padding, grouped by expert."""
        ...

    def start_backward(self, grad_RD: Tensor) -> Handle:
        """Start returning gradients of these rows, of the same shape."""
        ...

    def finish_backward(self, arrived: Tensor) -> Tensor:
        """Return the gradients of the tokens, (T, D)."""
        ...

    def leaving(self) -> tuple[int, int]:
        """Return how many rows of D leave this rank in ``start`` and in ``start_backward``."""
        ...


@dataclass(frozen=True, eq=False)
class ByChoice:
    """A token is sent once for each of its choices: one all-to-all each way.

    Gradients of its copies come back one by one and are added in the order of the choices. So the
    bits do not depend on the number of ranks.
    """

    axis: Axis
    tokens_S: Tensor
    """Token of each row that is sent."""
    table: RowTable
    """Row of each choice."""
    grouping: Grouping
    send: tuple[int, ...]
    receive: tuple[int, ...]

    def start(self, x_TD: Tensor) -> Handle:
        """Start an all-to-all of tokens (T, D): of rows (S, D), of which (R, D) arrive."""
        rows = x_TD.index_select(0, self.tokens_S)
        return all_to_all(rows, self.axis, self.send, self.receive, async_op=True)

    def finish(self, arrived: Tensor) -> Tensor:
        """Group (R, D) by expert."""
        return self.grouping.by_expert(arrived)

    def start_backward(self, grad_RD: Tensor) -> Handle:
        """Start an all-to-all of (R, D), of which (S, D) arrive."""
        rows = self.grouping.by_source(grad_RD)
        return all_to_all(rows, self.axis, self.receive, self.send, async_op=True)

    def finish_backward(self, arrived: Tensor) -> Tensor:
        """Add the gradients (S, D) of each token's copies in the order of its choices: (T, D)."""
        return add_rows(arrived, self.table)

    def leaving(self) -> tuple[int, int]:
        """Return rows for others, and from others."""
        return leaving(self.axis, self.send), leaving(self.axis, self.receive)


def leaving(axis: Axis, counts: tuple[int, ...]) -> int:
    """Return the sum of the counts of other ranks."""
    return sum(counts) - counts[axis.rank]
