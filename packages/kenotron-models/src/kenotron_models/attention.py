"""Causal self-attention with grouped key and value heads (Ainslie et al., arXiv 2305.13245).

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden, H query heads, G kv heads,
K features of a head; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis, Chunk
from kenotron_models.context import Context
from kenotron_models.recompute import between
from kenotron_models.rope import rotary_angles, rotate
from kenotron_models.spec import Architecture, DecoderSpec
from kenotron_tp import ColumnParallelLinear, RowParallelLinear, TPMode


class Attention(nn.Module):
    """Heads are cut over tp; with more ranks than kv heads, each kv head lives on several.

    ``forward``: x (T, D), context -> (T, D); tokens are cut, (T/t, D), under
    ``sequence_parallel``. Raises ValueError when the axis does not divide the query heads, or kv
    heads and axis do not divide one another.
    """

    def __init__(
        self,
        config: Architecture,
        axis: Axis,
        *,
        layer: int = 0,
        mode: TPMode = TPMode(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        spec = config.decoder
        heads, kv_heads, width = spec.num_attention_heads, spec.kv_heads, spec.head_dim
        if heads % axis.size:
            raise ValueError(
                f"cannot split {heads} attention heads over {axis.size} {axis.name} ranks: "
                "choose a tensor-parallel size that divides num_attention_heads"
            )
        self.spec: DecoderSpec = spec
        self.layer = layer
        self.heads = heads // axis.size  # H/t
        self.kv_heads = max(kv_heads // axis.size, 1)  # G/t
        kv = Chunk(kv_heads * width, parts=kv_heads)
        self.qkv = ColumnParallelLinear(
            spec.hidden_size,
            (heads + 2 * kv_heads) * width,
            axis,
            chunks=(Chunk(heads * width), kv, kv),
            bias=spec.qkv_bias,
            **mode.column,
            device=device,
            dtype=dtype,
        )
        self.out = RowParallelLinear(
            heads * width,
            spec.hidden_size,
            axis,
            bias=spec.out_bias,
            **mode.row,
            device=device,
            dtype=dtype,
        )

    def forward(
        self, x: Tensor, context: Context, *, norm: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """(T, D) -> (T, D): every token sees itself and the earlier ones of its row.

        ``norm`` is applied to x first, and its result is not kept for the backward.
        """
        batch, sequence = context.positions_BS.shape
        read = partial(self.qkv, tokens=batch * sequence)
        qkv = read(x) if norm is None else between(norm, x, read)
        qkv = qkv.view(batch, sequence, self.heads + 2 * self.kv_heads, -1)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=2)
        spec = self.spec
        cos, sin = rotary_angles(
            context.positions_BS, spec.head_dim, spec.rope_theta, spec.rope_scaling
        )
        qk = rotate(qk, cos, sin, interleaved=spec.rope_interleaved)  # both at once
        q, k = qk.split((self.heads, self.kv_heads), dim=2)
        k, v, mask = k.transpose(1, 2), v.transpose(1, 2), None  # (B, G/t, S, K)
        cache = context.cache
        if cache is not None:
            k, v = cache.extend(self.layer, k, v, context.positions_BS)
            mask = context.once("seen", lambda: cache.seen(context.positions_BS, None))
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),  # (B, H/t, S, K)
            k,
            v,
            mask,
            is_causal=cache is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.out(mixed.transpose(1, 2).reshape(batch * sequence, -1))
