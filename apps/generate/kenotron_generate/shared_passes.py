"""Forward passes of replicas that share experts: all replicas make each pass together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kenotron_dist import Mesh, all_reduce
from kenotron_models import Context
from kenotron_pp import Pipeline


class SharedPasses:
    """Forward pass of a pipeline for ``kenotron_models.generate``.

    Where experts are cut over ranks of dp or cp, a pass exchanges tokens with other replicas, whose
    texts end at other times. Each pass then begins by counting the replicas that have texts. One
    that has none left takes part with a token that no expert sees, until no replica has any. Where
    the ranks of tp hold all experts, replicas are independent, and nothing is counted.

    Args:
        pipeline: this rank's stage.
        mesh: its ranks; those of cp are replicas as those of dp are.
    """

    def __init__(self, pipeline: Pipeline, mesh: Mesh) -> None:
        self._pipeline, self._device = pipeline, mesh.device
        apart = mesh.sizes["tp"] % mesh.config.ep == 0  # ranks of ep are neighbours along tp
        self._replicas = None if apart else mesh["dp", "cp"]

    def __call__(self, tokens: Tensor, context: Context) -> Tensor | None:
        """Return the logits of ``context.outputs`` on the last stage, None on the others.

        Collective over pp and tp, and over dp and cp where replicas share experts.

        Args:
            tokens: (T,), those of all texts.
            context: their places.
        """
        self._active(1)
        return self._forward(tokens, context)

    def finish(self) -> None:
        """Take part in the passes of replicas that still have texts. Collective as a pass is."""
        while self._active(0):
            zeros = torch.zeros(1, 1, dtype=torch.int64, device=self._device)
            only, padding = zeros.new_zeros(1), torch.ones_like(zeros, dtype=torch.bool)
            with torch.inference_mode():
                self._forward(only, Context(zeros, outputs=only, padding_BS=padding))

    def _active(self, own: int) -> int:
        """Count the replicas that have texts for the next pass; 0 where they are independent."""
        if self._replicas is None:
            return 0
        count = torch.tensor(own, device=self._device)
        return int(all_reduce(count, self._replicas))

    def _forward(self, tokens: Tensor, context: Any) -> Tensor | None:
        logits = self._pipeline.forward([tokens], [context])
        return logits[0] if logits else None
