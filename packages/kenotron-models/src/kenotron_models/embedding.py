"""From tokens to the residual stream.

Shapes: B rows of S tokens, T = B * S, D hidden; ``/t`` is divided by tp size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import declare_roles
from kenotron_dist.placement import Partial
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.dropout import drop_features
from kenotron_models.spec import Architecture
from kenotron_models.virtual_chunks import in_chunks
from kenotron_tp import VocabParallelEmbedding, split_tokens


class Embedding(VocabParallelEmbedding):
    """Tokens (T,) int64 -> (T, D), with learned positions and dropout where the model has them.

    ``positions`` (P, D), P the longest text, is whole on every tp rank.
    """

    def __init__(self, config: Architecture, build: Build, *, divisible_by: int = 1) -> None:
        spec = config.decoder
        super().__init__(
            spec.vocab_size, spec.hidden_size, build.tp, divisible_by=divisible_by,
            **build.mode.embedding, **build.storage,
        )  # fmt: skip
        self.cuts_after, self.in_fp32 = build.cuts_between, spec.residual_in_fp32
        self.dropout, self.scale = spec.embedding_dropout, spec.embedding_scale
        self.positions: nn.Parameter | None = None
        if spec.learned_positions:
            shape = spec.max_position_embeddings, spec.hidden_size
            table = torch.empty(shape, **build.storage)
            self.positions = nn.Parameter(table if table.is_meta else nn.init.normal_(table))
            declare_roles(self, positions="embedding")
            if build.sequence_parallel:
                self.placements["positions"] = Partial(build.tp.name)

    def forward(
        self,
        ids: Tensor,
        context: Context | None = None,
        *,
        sequence_parallel: bool | None = None,
    ) -> Tensor:
        """(T,) -> (T, D), (T/t, D) under sequence parallelism.

        Raises IndexError for a position outside the table of learned ones.
        """
        if context is None or not context.chunks:
            x = self._embed(ids, context, sequence_parallel=sequence_parallel)
        else:
            x = in_chunks(self, ids, context, Embedding._embed)
        return split_tokens(x, self.axis) if self.cuts_after and context is not None else x

    def _embed(
        self, ids: Tensor, context: Context | None, *, sequence_parallel: bool | None = None
    ) -> Tensor:
        """All tokens (T, D), whatever is cut after the layer; see ``forward``."""
        x = super().forward(ids, sequence_parallel=sequence_parallel)
        if self.in_fp32:  # what is added to it is fp32, too
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.scale is not None:
            x = x * torch.tensor(self.scale, dtype=self.weight.dtype).item()
        if context is None:
            return x
        cut = self.sequence_parallel if sequence_parallel is None else sequence_parallel
        if self.positions is not None:
            x = x + self._places(context, len(x) if cut else None)
        return drop_features(
            x, self.dropout, context, "embedding", self.axis, sequence_parallel=cut
        )

    def _places(self, context: Context, rows: int | None) -> Tensor:
        """Learned positions (T, D), or those of this rank's ``rows`` tokens."""
        assert self.positions is not None
        places = context.positions_BS.flatten()
        most = len(self.positions)
        if places.device.type == "cpu" and (last := int(places.max())) >= most:
            raise IndexError(
                f"position {last} is outside the model's {most} learned ones "
                "(max_position_embeddings): give shorter texts"
            )
        if rows is not None:
            places = F.pad(places, (0, rows * self.axis.size - len(places)))
            places = places[self.axis.rank * rows : (self.axis.rank + 1) * rows]
        return F.embedding(places.clamp(min=0), self.positions)
