"""The feed-forward block, gated (SwiGLU: Shazeer, arXiv 2002.05202) or not.

Shapes: T flattened tokens, D hidden, F feed-forward; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis, Chunk
from kenotron_models.recompute import between
from kenotron_models.spec import Activation, Architecture
from kenotron_tp import ColumnParallelLinear, RowParallelLinear, TPMode

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class MLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, gate and up in one matrix (2F, D); or ``down(act(up(x)))``.

    ``forward``: (T, D) -> (T, D), (T/t, D) under sequence parallelism. Raises ValueError when the
    axis does not divide F.
    """

    def __init__(
        self,
        config: Architecture,
        axis: Axis,
        *,
        mode: TPMode = TPMode(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        spec = config.decoder
        self.gated, self.act = spec.gated, ACTIVATIONS[spec.activation]
        width = Chunk(spec.intermediate_size)
        chunks = (width, width) if spec.gated else (width,)
        first = ColumnParallelLinear(
            spec.hidden_size,
            len(chunks) * spec.intermediate_size,
            axis,
            chunks=chunks,
            bias=spec.mlp_bias,
            **mode.column,
            device=device,
            dtype=dtype,
        )
        self.add_module("gate_up" if spec.gated else "up", first)
        self.down = RowParallelLinear(
            spec.intermediate_size,
            spec.hidden_size,
            axis,
            bias=spec.mlp_bias,
            **mode.row,
            device=device,
            dtype=dtype,
        )

    @property
    def first(self) -> nn.Module:
        """The matrix that reads the block's input."""
        return self.get_submodule("gate_up" if self.gated else "up")

    def activate(self, y: Tensor) -> Tensor:
        """(T, 2F/t), or (T, F/t) without gate -> (T, F/t)."""
        if not self.gated:
            return self.act(y)
        gate, up = y.chunk(2, -1)
        return self.act(gate) * up

    def forward(
        self,
        x: Tensor,
        tokens: int | None = None,
        *,
        norm: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """(T, D) -> (T, D).

        Arguments: tokens T, where they are cut and the axis does not divide it; a norm that is
        applied to x first: then neither its result nor the activations are kept for the backward.
        """
        if norm is None:
            return self.down(self.activate(self.first(x, tokens=tokens)))
        y = between(norm, x, partial(self.first, tokens=tokens))
        return between(self.activate, y, self.down)
