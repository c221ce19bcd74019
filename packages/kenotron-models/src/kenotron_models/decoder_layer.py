"""One layer of a decoder: attention and feed-forward, each behind a norm and added to its input.

Shapes: T flattened tokens, D hidden; T/t under sequence parallelism.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Axis
from kenotron_models.attend import keep_out_of_programs
from kenotron_models.attention import Attention
from kenotron_models.context import Context
from kenotron_models.dropout import drop_features
from kenotron_models.mlp import MLP
from kenotron_models.norm import residual_norm
from kenotron_models.recompute import Recompute, whole
from kenotron_models.spec import Architecture
from kenotron_tp import TPMode


class DecoderLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``: (T, D) -> (T, D).

    ``recompute``: what is computed again in the backward instead of being kept.
    """

    def __init__(
        self,
        config: Architecture,
        axis: Axis,
        *,
        layer: int = 0,
        mode: TPMode = TPMode(),
        recompute: Recompute = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        spec = config.decoder
        self.layer, self.axis, self.recompute = layer, axis, recompute
        self._compiled = False
        self.dropout, self.sequence_parallel = spec.residual_dropout, mode.sequence_parallel
        cut = mode.sequence_parallel
        norm = partial(residual_norm, spec, axis, sequence_parallel=cut, device=device, dtype=dtype)
        self.attention_norm = norm()
        self.attention = Attention(spec, axis, layer=layer, mode=mode, device=device, dtype=dtype)
        self.mlp_norm = norm()
        self.mlp = MLP(spec, axis, mode=mode, device=device, dtype=dtype)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what the layer computes; arguments are those of ``torch.compile``.

        What all layers of a micro-batch share is made before, outside of the program, which is then
        the same for all of them.
        """
        keep_out_of_programs()
        # Keys of dropout are of one layer and one step: no program is made for each of them.
        if self.dropout:
            self._drop_some = torch.compiler.disable(self._drop_some)
        if self.attention.spec.attention_dropout:
            disabled = torch.compiler.disable(self.attention.attend_with_dropout)
            self.attention.attend_with_dropout = disabled
        self._layer = torch.compile(self._layer, *args, **kwargs)
        self._compiled = True

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(T, D) -> (T, D)."""
        if self._compiled:
            self.attention.prepare(context)
        if self.recompute == "full" and torch.is_grad_enabled():
            return whole(self._layer, x, context)
        return self._layer(x, context)

    def _layer(self, x: Tensor, context: Context) -> Tensor:
        if self.recompute == "selective":
            x = x + self._drop(
                self.attention(x, context, norm=self.attention_norm), context, "attention"
            )
            return x + self._drop(self.mlp(x, context.tokens, norm=self.mlp_norm), context, "mlp")
        x = x + self._drop(self.attention(self.attention_norm(x), context), context, "attention")
        return x + self._drop(self.mlp(self.mlp_norm(x), context.tokens), context, "mlp")

    def _drop(self, x: Tensor, context: Context, block: str) -> Tensor:
        return self._drop_some(x, context, block) if self.dropout else x

    def _drop_some(self, x: Tensor, context: Context, block: str) -> Tensor:
        return drop_features(
            x,
            self.dropout,
            context,
            f"layers.{self.layer}.{block}",
            self.axis,
            sequence_parallel=self.sequence_parallel,
        )
