"""Options that change the scores of attention: one value that every kernel takes whole.

B rows, H query heads, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

KeepMask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(rows (B,), heads (H,), query positions (Q,), key positions (K,)) -> bool (B, H, Q, K)."""


class Dropout(NamedTuple):
    """Dropout of attention probabilities that depends on global coordinates only."""

    p: float
    """Probability of being dropped."""
    keep: KeepMask
    """A pure function of int64 tensors of indices: row of the batch, query head, global position
    of the query and of the key; True where a probability is kept."""
    first_head: int = 0
    """Number under which ``keep`` knows the first query head."""

    def kept(self, rows: int, heads: range, queries: Tensor, keys: Tensor) -> Tensor:
        """Return which probabilities are kept of the first rows and of some of the heads here.

        Args:
            rows: B.
            heads: H of them, by their numbers among those held here.
            queries: global positions (Q,).
            keys: global positions (K,), on the same device.

        Returns:
            Bool (B, H, Q, K).
        """
        row = torch.arange(rows, device=queries.device)
        first, last = self.first_head + heads.start, self.first_head + heads.stop
        return self.keep(row, torch.arange(first, last, device=queries.device), queries, keys)


@dataclass(frozen=True, eq=False)
class Scoring:
    """All that makes probabilities of the products of queries and keys, except the mask.

    A kernel declares the fields that it applies, and ``check`` refuses every other one that is set.
    So a new field changes this class and the kernels that apply it. None means that a field is not
    set; a tensor has one value for each query head, in its last dim.

    Raises ValueError for a cap that is not a finite number above 0, and for a probability of
    dropout outside [0, 1).
    """

    scale: float
    """Factor of the products."""
    cap: float | None = None
    """Scores s become cap * tanh(s / cap) before the mask (Gemma-2, arXiv 2408.00118)."""
    sinks: Tensor | None = None
    """A score (H,) without a value, which takes its share of every softmax (gpt-oss); or one for
    each query here, (B, Q, H)."""
    dropout: Dropout | None = None
    """Of the probabilities."""

    def __post_init__(self) -> None:
        if self.cap is not None and not 0 < self.cap < float("inf"):
            raise ValueError(f"Scoring: cap is {self.cap}, it must be a finite number above 0")
        if self.dropout is not None and not 0 <= self.dropout.p < 1:
            raise ValueError(f"Scoring: dropout p is {self.dropout.p}, it must be within [0, 1)")

    def unsupported(self, supported: Collection[str]) -> list[str]:
        """Return the names of fields that are set and not among ``supported``."""
        return [n for n, value in vars(self).items() if value is not None and n not in supported]

    def check(self, kernel: str, supported: Collection[str], advice: str) -> None:
        """Raise ValueError where a field is set that a kernel does not apply.

        Args:
            kernel: the kernel's name, at the begin of the error.
            supported: names of the fields that it applies.
            advice: the end of the error.
        """
        if missing := self.unsupported(supported):
            raise ValueError(f"{kernel} has no {' and no '.join(missing)}: {advice}")

    def per_head(self) -> dict[str, Tensor]:
        """Return the fields that have a value for each query head, (H,) or (B, Q, H)."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def of_heads(self, begin: int, end: int) -> Scoring:
        """Return the same for the query heads ``begin`` to ``end`` of those here."""
        changed = {name: value[..., begin:end] for name, value in self.per_head().items()}
        dropout = self.dropout
        if dropout is not None:
            dropout = dropout._replace(first_head=dropout.first_head + begin)
        return replace(self, **changed, dropout=dropout)
