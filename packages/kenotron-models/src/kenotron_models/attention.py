"""Causal self-attention with grouped key and value heads (Ainslie et al., arXiv 2305.13245).

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden, H query heads, G kv heads,
K features of a head; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from kenotron_dist import Axis, Chunk
from kenotron_models.attend import attend, check_backend, prepare
from kenotron_models.attend_plain import dropout_of
from kenotron_models.context import Context
from kenotron_models.norm import RMSNorm
from kenotron_models.recompute import between
from kenotron_models.rope import rotary_angles, rotate
from kenotron_models.sight import Sight
from kenotron_models.spec import Architecture, DecoderSpec
from kenotron_tp import ColumnParallelLinear, RowParallelLinear, TPMode


class Attention(nn.Module):
    """Heads are cut over tp; with more ranks than kv heads, each kv head lives on several.

    ``forward``: x (T, D), context -> (T, D); tokens are cut, (T/t, D), under
    ``sequence_parallel``. ``layer``: its number in the model, from 0; windows, positions and
    dropout depend on it. Raises ValueError when the axis does not divide the query heads, kv heads
    and axis do not divide one another, or the ordered back end is not installed.
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
        check_backend(spec.attention)
        self.spec: DecoderSpec = spec
        self.layer, self.axis = layer, axis
        # Asked for here: a program that reads the layer's number is one for that layer alone.
        self.rotates, self.window = spec.rotates(layer), spec.window_of(layer)
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

        if spec.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(  # (K,): each rank norms other heads, so gradients are partial
                    width, spec.norm_eps, axis, sequence_parallel=True, device=device, dtype=dtype
                )
                for _ in range(2)
            )

    def prepare(self, context: Context) -> None:
        """Make what all layers read of the micro-batch, unless it is there; ``forward`` does it.

        To be called before a compiled ``forward``, which is then the same code for all layers.
        """
        if self.rotates:
            self._angles(context)
        prepare(self._sight(context), self.spec.attention)

    def forward(
        self, x: Tensor, context: Context, *, norm: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """(T, D) -> (T, D): every token sees itself and the earlier ones that it may.

        ``norm`` is applied to x first; then neither its result nor turned queries and keys are kept
        for the backward.
        """
        batch, sequence = context.positions_BS.shape
        read = partial(self.qkv, tokens=batch * sequence)
        qkv = read(x) if norm is None else between(norm, x, read)
        qkv = qkv.view(batch, sequence, self.heads + 2 * self.kv_heads, -1)
        turn, mix = partial(self._turn, context=context), partial(self._mix, qkv, context=context)
        mixed = mix(turn(qkv)) if norm is None else between(turn, qkv, mix)
        return self.out(mixed.reshape(batch * sequence, -1))

    def _turn(self, qkv: Tensor, context: Context) -> Tensor:
        """Queries and keys (B, S, H/t + G/t, K), normed and turned."""
        qk = qkv[:, :, : self.heads + self.kv_heads]
        if self.spec.qk_norm:
            q, k = qk.split((self.heads, self.kv_heads), dim=2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 2)
        if self.rotates:
            cos, sin = self._angles(context)
            qk = rotate(qk, cos, sin, interleaved=self.spec.rope_interleaved)  # both at once
        return qk.to(qkv.dtype)

    def _mix(self, qkv: Tensor, qk: Tensor, context: Context) -> Tensor:
        """Values (B, S, H/t, K), mixed as queries and keys say."""
        q, k = qk.split((self.heads, self.kv_heads), dim=2)
        v, spec, cache = qkv[:, :, self.heads + self.kv_heads :], self.spec, context.cache
        if cache is not None:
            cache.extend(self.layer, k, v, context.positions_BS)
            if cache.used > q.shape[1]:
                window, places = self.window, context.positions_BS
                seen = context.once(("seen", window), lambda: cache.seen(places, window))
                return cache.attend(self.layer, q, seen, spec.scale)
        if spec.attention_dropout:
            return self.attend_with_dropout(q, k, v, context)
        return attend(q, k, v, self._sight(context), scale=spec.scale, backend=spec.attention)

    def attend_with_dropout(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """``attend`` with this layer's dropout, in a step that has any."""
        spec, first_head = self.spec, self.axis.rank * self.heads
        dropout = dropout_of(context, spec.attention_dropout, self.layer, first_head)
        sight = self._sight(context)
        return attend(q, k, v, sight, scale=spec.scale, backend=spec.attention, dropout=dropout)

    def _angles(self, context: Context) -> tuple[Tensor, Tensor]:
        width, theta, scaling = self.spec.head_dim, self.spec.rope_theta, self.spec.rope_scaling
        if theta is None:
            raise ValueError(f"layer {self.layer} turns nothing: its model has no rope_theta")
        return context.once(
            ("angles", width, theta, scaling),
            lambda: rotary_angles(context.positions_BS, width, theta, scaling),
        )

    def _sight(self, context: Context) -> Sight:
        return Sight(context, self.window, self.spec.separate_documents)
