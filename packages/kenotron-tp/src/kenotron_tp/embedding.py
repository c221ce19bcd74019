"""Token embedding cut over the vocabulary.

Shapes: V vocabulary, D embedding dim, T flattened tokens; ``/t`` is divided by tp size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis, Chunk, Placements, Shard, TensorLayout, local_shape
from kenotron_dist.autograd import reduce_from, reduce_scatter_to
from kenotron_dist.boxes import scatter


def vocabulary_chunk(vocab_size: int, ranks: int, divisible_by: int = 1) -> Chunk:
    """The vocabulary as one chunk, padded so that every rank holds the same number of rows.

    Rows per rank are a multiple of ``divisible_by``. Padding rows are no part of the logical
    tensor: they start at zero, get no loss and are never sampled. Raises ValueError unless both
    numbers are positive.
    """
    if vocab_size < 1 or divisible_by < 1:
        raise ValueError(
            f"vocab_size {vocab_size} and divisible_by {divisible_by} must be positive"
        )
    unit = ranks * divisible_by
    return Chunk(vocab_size, pad=-vocab_size % unit)


class VocabParallelEmbedding(nn.Module):
    """Look up rows of a (V, D) table of which every rank holds V/t rows.

    Arguments:
        num_embeddings: V; it need not divide by the axis (see ``vocabulary_chunk``).
        embedding_dim: D.
        axis: the tp axis; size 1 makes this an ``nn.Embedding``.
        sequence_parallel: ids are flattened (T,) and the output is this rank's tokens (T/t, D).
        divisible_by: rows per rank are a multiple of this.
        device, dtype: of the table. Off meta it starts as ``nn.Embedding``'s would on one process.

    ``forward``: ids (...) int64 -> (..., D). One all-reduce (or reduce-scatter) in forward.
    Raises IndexError for an id outside the table on one rank, as torch does. On several ranks the
    row of an id that nobody holds is zero (looking for one would stop a GPU).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        axis: Axis,
        *,
        sequence_parallel: bool = False,
        divisible_by: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        rows = Shard(axis.name, 0, (vocabulary_chunk(num_embeddings, axis.size, divisible_by),))
        whole = torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        layout = TensorLayout("weight", tuple(whole.shape), (rows,))
        sizes, coords = {axis.name: axis.size}, {axis.name: axis.rank}
        if whole.is_meta:
            local = whole.new_empty(local_shape(layout, sizes))
        else:
            local = scatter(nn.init.normal_(whole), layout, sizes, coords)
        self.weight = nn.Parameter(local)  # (V/t, D)
        self.placements: Placements = {"weight": rows}

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (...) -> (..., D); (T,) -> (T/t, D) under sequence parallelism."""
        if self.axis.size == 1:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        own = ids - self.axis.rank * rows
        foreign = (own < 0) | (own >= rows)
        x = F.embedding(own.masked_fill(foreign, 0), self.weight)
        x = x.masked_fill(foreign.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter_to(x, self.axis)
        return reduce_from(x, self.axis)
