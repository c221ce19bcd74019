"""Communication of all cut layers of a model, as one value for their constructors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


class RowOptions(TypedDict):
    """Keyword arguments of ``RowParallelLinear``."""

    sequence_parallel: bool
    overlap: bool


class EmbeddingOptions(TypedDict):
    """Keyword arguments of ``VocabParallelEmbedding``."""

    sequence_parallel: bool


class ColumnOptions(RowOptions):
    """Keyword arguments of ``ColumnParallelLinear``."""

    regather: bool


@dataclass(frozen=True, kw_only=True)
class TPMode:
    """The mode of a model's cut layers: ``ColumnParallelLinear(..., **mode.column)``.

    The numbers are the same in every mode, up to the order of additions.
    """

    sequence_parallel: bool = False
    """Between cut layers each rank holds its own tokens; norms work on 1/t of them."""
    overlap: bool = False
    """Communication travels while pieces are multiplied."""
    regather: bool = False
    """Under sequence parallelism (else without effect) gathered tokens are not kept for backward:
    they are gathered again."""

    @property
    def embedding(self) -> EmbeddingOptions:
        """For embeddings."""
        return {"sequence_parallel": self.sequence_parallel}

    @property
    def column(self) -> ColumnOptions:
        """For column layers."""
        return {**self.row, "regather": self.regather}

    @property
    def row(self) -> RowOptions:
        """For row layers."""
        return {"sequence_parallel": self.sequence_parallel, "overlap": self.overlap}
