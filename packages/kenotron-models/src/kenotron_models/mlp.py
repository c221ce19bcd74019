"""The gated feed-forward block (SwiGLU: Shazeer, arXiv 2002.05202).

Shapes: T flattened tokens, D hidden, F feed-forward; ``/t`` is divided by tp size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis, Chunk
from kenotron_tp import ColumnParallelLinear, RowParallelLinear, TPMode


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, gate and up in one matrix (2F, D).

    ``forward``: (T, D) -> (T, D), (T/t, D) under ``sequence_parallel``. Raises ValueError when the
    axis does not divide F.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        axis: Axis,
        *,
        mode: TPMode = TPMode(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear(
            hidden,
            2 * intermediate,
            axis,
            chunks=(Chunk(intermediate), Chunk(intermediate)),
            **mode.column,
            device=device,
            dtype=dtype,
        )
        self.down = RowParallelLinear(
            intermediate,
            hidden,
            axis,
            **mode.row,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """(T, D) -> (T, D). ``tokens``: T, where they are cut and the axis does not divide it."""
        gate, up = self.gate_up(x, tokens=tokens).chunk(2, -1)  # (T, F/t) each
        return self.down(F.silu(gate) * up)
