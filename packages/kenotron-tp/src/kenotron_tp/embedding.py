"""Token embedding cut over the vocabulary.

Shapes: V vocabulary, D embedding dim, T flattened tokens; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis, Roles
from kenotron_dist.autograd import reduce_from, reduce_scatter_to
from kenotron_dist.placement import Chunk, Placements, Shard
from kenotron_tp.cut import check_axis, cut_parameter, take_parts
from kenotron_tp.sequence import call_mode, check_tokens, pad_tokens


def vocabulary_chunk(vocab_size: int, ranks: int, divisible_by: int = 1) -> Chunk:
    """The vocabulary as one chunk, padded so that every rank holds the same number of rows.

    Rows per rank are a multiple of ``divisible_by``. Padding rows are no part of the logical
    tensor: they start at zero, get no loss and are never sampled. Raises ValueError unless all
    numbers are positive.
    """
    if vocab_size < 1 or ranks < 1 or divisible_by < 1:
        raise ValueError(
            f"vocab_size {vocab_size}, ranks {ranks} and divisible_by {divisible_by} must be "
            "positive"
        )
    unit = ranks * divisible_by
    return Chunk(vocab_size, pad=-vocab_size % unit)


def check_embedding(embedding: nn.Embedding) -> None:
    """Raise ValueError for one that renormalises, scales gradients or has sparse ones."""
    for name, plain in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
        if (given := getattr(embedding, name)) != plain:
            raise ValueError(f"{name} {given!r} of an nn.Embedding is not known here: leave it")


class VocabParallelEmbedding(nn.Module):
    """Look up rows of a (V, D) table of which every rank holds V/t rows.

    Args:
        num_embeddings: V; it need not divide by the axis (see ``vocabulary_chunk``).
        embedding_dim: D.
        axis: the tp axis; size 1 makes this an ``nn.Embedding``.
        padding_idx: a row that starts at zero (off meta) and gets no gradient, as
            ``nn.Embedding``'s; negative ones count from V.
        sequence_parallel: the output is this rank's tokens (n, ..., D) of ids (T, ...).
        divisible_by: rows per rank are a multiple of this.
        device, dtype: of the table. Off meta it starts as ``nn.Embedding``'s would on one process.

    Raises:
        ValueError: ``padding_idx`` is outside the table.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        axis: Axis,
        *,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        divisible_by: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_axis(axis)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx {padding_idx} is outside the table of {num_embeddings} rows: choose "
                "one of them, or None"
            )
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.num_embeddings = num_embeddings
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        rows = Shard(axis.name, 0, (vocabulary_chunk(num_embeddings, axis.size, divisible_by),))
        whole = torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        if not whole.is_meta:
            nn.init.normal_(whole)
            if self.padding_idx is not None:
                nn.init.zeros_(whole[self.padding_idx])
        self.weight = cut_parameter(whole, "weight", rows, axis)  # (V/t, D)
        self.placements: Placements = {"weight": rows}
        self.roles: Roles = {"weight": "embedding"}

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, axis: Axis, **options: Any) -> Self:
        """An embedding with this rank's rows of a whole one's table, which are copied.

        ``options``: ``sequence_parallel``, ``divisible_by``. All ranks give the same table.
        Raises ValueError for one that renormalises, scales gradients or has sparse ones.
        """
        check_embedding(embedding)
        made = cls(
            embedding.num_embeddings, embedding.embedding_dim, axis,
            padding_idx=embedding.padding_idx, device="meta", dtype=embedding.weight.dtype,
            **options,
        )  # fmt: skip
        return take_parts(made, embedding, axis, made.placements)

    def forward(self, ids: Tensor, *, sequence_parallel: bool | None = None) -> Tensor:
        """Ids (...) int64 -> (..., D); (T, ...) -> (n, ..., D) under sequence parallelism.

        ``sequence_parallel``: another mode than the layer's, for inference. One all-reduce (or
        reduce-scatter, padded to n rows) in forward. Raises IndexError on CPU for an id outside
        0..V-1; elsewhere its row is zero and gets no gradient, on any number of ranks: looking for
        one would stop a GPU, and reading outside the table would end its context. Raises ValueError
        when the mode is changed while gradients are recorded.
        """
        sequence = call_mode(self, self.sequence_parallel, sequence_parallel)
        checked = _on_host(ids)
        if checked:
            self._check(ids)
        if self.axis.size == 1:
            if checked:
                return F.embedding(ids, self.weight, self.padding_idx)
            return self._look_up(ids)
        x = self._look_up(ids)
        if sequence:
            check_tokens(x)
            return reduce_scatter_to(pad_tokens(x, self.axis), self.axis)
        return reduce_from(x, self.axis)

    def _look_up(self, ids: Tensor) -> Tensor:
        """Rows (..., D) of ids that this rank holds, zero for others and those outside 0..V-1."""
        rows = self.weight.shape[0]
        first = self.axis.rank * rows
        own = ids - first
        foreign = (own < 0) | (own >= min(rows, self.num_embeddings - first))
        x = F.embedding(own.masked_fill(foreign, 0), self.weight, self._own_padding(first, rows))
        return x.masked_fill(foreign.unsqueeze(-1), 0.0)

    def _own_padding(self, first: int, rows: int) -> int | None:
        if self.padding_idx is None or not first <= self.padding_idx < first + rows:
            return None
        return self.padding_idx - first

    def extra_repr(self) -> str:
        """Local size and mode."""
        (rows, dim), axis = self.weight.shape, self.axis
        return (
            f"{rows} of {self.num_embeddings} rows x {dim} on rank {axis.rank} of {axis.size} "
            f"along {axis.name}, padding_idx={self.padding_idx}, "
            f"sequence_parallel={self.sequence_parallel}"
        )

    def _check(self, ids: Tensor) -> None:
        if ids.is_floating_point():
            raise ValueError(f"ids are {ids.dtype}: they are int64 or int32")
        outside = (ids < 0) | (ids >= self.num_embeddings)
        if outside.any():
            place = tuple(outside.nonzero()[0].tolist())
            raise IndexError(
                f"id {ids[place].item()} at position {place} is outside the embedding's "
                f"0..{self.num_embeddings - 1}"
            )


def _on_host(ids: Tensor) -> bool:
    """Return whether reading the ids waits for no device."""
    return ids.device.type == "cpu"
