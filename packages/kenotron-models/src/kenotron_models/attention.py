"""Causal self-attention with grouped key and value heads (Ainslie et al., arXiv 2305.13245).

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden, H query heads, G kv heads,
K features of a head; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from kenotron_cp import AttentionSize, Cut, Way, attention_traffic
from kenotron_cp import Sight as SightOfRow
from kenotron_dist import Chunk, declare_roles
from kenotron_models.attention_backends import AttentionBackend, attend, check_backend, prepare
from kenotron_models.attention_cp import attend_cut, sight_of_rows
from kenotron_models.attention_mask import Sight
from kenotron_models.attention_reference import Dropout, dropout_of
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.norm import HeadsRMSNorm, NormSpec, mean_squares
from kenotron_models.part import Normed, Part
from kenotron_models.recompute import between
from kenotron_models.rope import Rope, rotary_angles, rotate


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention; the config of a family has checked its sizes."""

    name: ClassVar[str] = "attention"
    heads: int
    """H, query heads."""
    kv_heads: int
    """G, key and value heads; divides H."""
    head_dim: int
    """K, features of a head."""
    scale: float | None = None
    """What scores are multiplied with; None: 1/sqrt(K)."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    out_bias: bool = False
    """The output has a bias."""
    qk_norm: NormSpec | None = None
    """Queries and keys are normed before they are turned; None: they are not."""
    qk_norm_over: Literal["head", "width"] = "head"
    """What that norm is over: the features of each head, or those of all heads of all tp ranks."""
    rope: Rope | None = Rope()
    """How positions turn queries and keys; None: they do not."""
    window: int | None = None
    """Tokens that a token sees, itself counted; None: all before it."""
    separate_documents: bool = False
    """A token sees its own document only: they begin where positions do not increase by one."""
    backend: AttentionBackend = "auto"
    """What computes attention; the numbers differ by rounding only. auto: flash_attn where it is
    installed and can run, varlen on CUDA where more than the future is hidden, blocked on the CPU
    where it is faster, else sdpa."""
    dropout: float = 0.0
    """Share of attention's probabilities that is dropped in training."""

    def build(self, width: int, build: Build, layer: int = 0) -> Attention:
        """Make the module; see ``PartSpec``."""
        return Attention(self, width, build, layer=layer)

    @property
    def factor(self) -> float:
        """What scores are multiplied with."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count operations of scores and of mixing values.

        ``causal``: of scores that are seen alone, else of the full square. Documents are not known
        here and count as one.
        """
        pairs = sequence**2
        if causal:
            seen = min(self.window or sequence, sequence)
            pairs = seen * (seen + 1) // 2 + (sequence - seen) * seen
        return 4 * batch * self.heads * self.head_dim * pairs

    def sent_over_sequence(
        self, rows: int, cut: Cut, way: Way, *, tp: int, dtype: torch.dtype
    ) -> tuple[int, int]:
        """Return the bytes of keys, or of heads, that leave a rank; see ``SendsOverSequence``."""
        heads, kv_heads = self.heads // tp, max(self.kv_heads // tp, 1)
        size = AttentionSize(rows, heads, kv_heads, self.head_dim, self.head_dim, dtype)
        return attention_traffic(way, size, SightOfRow(cut.sequence, self.window), cut, 0)

    def cost(self, width: int) -> int:
        """Count four projections as if all heads had their own keys and values; no scores."""
        return 4 * self.heads * self.head_dim * width


class Attention(Part):
    """Heads are cut over tp; with more ranks than kv heads, each kv head lives on several.

    Args:
        spec: what it is made of.
        width: D.
        build: how and where.
        layer: its number in the model, from 0: caches and dropout depend on it.

    Raises:
        ValueError: the axis does not divide the query heads, kv heads and axis do not divide one
            another, a norm over the width is no RMSNorm, or the ordered back end is not installed.
    """

    reads_cache = True
    cuts_sequence = True

    def __init__(self, spec: AttentionSpec, width: int, build: Build, *, layer: int = 0) -> None:
        super().__init__()
        self.prepare_heads(spec, build, layer)
        heads, kv_heads, features = spec.heads, spec.kv_heads, spec.head_dim
        kv = Chunk(kv_heads * features, parts=kv_heads)
        chunks, rows = (Chunk(heads * features), kv, kv), (heads + 2 * kv_heads) * features
        self.qkv = build.column(width, rows, bias=spec.qkv_bias, chunks=chunks)
        self.out = build.row(heads * features, width, bias=spec.out_bias)
        declare_roles(self.out, weight="residual")
        if spec.qk_norm is not None:
            self.q_norm = self._qk_norm(spec.qk_norm, heads, build)
            self.k_norm = self._qk_norm(spec.qk_norm, kv_heads, build)

    def _qk_norm(self, norm: NormSpec, heads: int, build: Build) -> nn.Module:
        features = self.spec.head_dim
        if self.spec.qk_norm_over == "head":  # (K,): each rank norms other heads
            return norm.build(features, build, partial=True)
        if norm.kind != "rms_norm":
            raise ValueError(
                f"qk_norm: {norm.kind} was given; over the width of all heads it must be rms_norm"
            )
        return HeadsRMSNorm(heads, features, norm.eps, build)

    def prepare_heads(self, spec: AttentionSpec, build: Build, layer: int) -> None:
        """Check what it is made of, and say which heads this rank has."""
        axis, heads = build.tp, spec.heads
        if heads % axis.size:
            raise ValueError(
                f"cannot split {heads} attention heads over {axis.size} {axis.name} ranks: "
                "choose a tensor-parallel size that divides num_attention_heads"
            )
        if not build.shapes_only:
            check_backend(spec.backend)
        self.spec, self.layer, self.axis = spec, layer, axis
        rope, features = spec.rope, spec.head_dim
        self.turned = features if rope is None else rope.features(features)  # by positions
        self.heads = heads // axis.size  # H/t
        self.kv_heads = max(spec.kv_heads // axis.size, 1)  # G/t

    def prepare(self, context: Context) -> None:
        """Make what all layers read of the micro-batch, unless it is there; ``forward`` does it.

        To be called before a compiled ``forward``, which is then the same code for all layers.
        """
        if self.spec.rope is not None:
            self._angles(context, self.spec.rope)
        if context.cut is None:
            prepare(self._sight(context), self.spec.backend)
        else:
            sight_of_rows(self._sight(context))

    def leave_out_of_programs(self) -> None:
        """Dropout, whose keys would make a program for each layer and step, and other ranks."""
        self.attend_over_ranks = torch.compiler.disable(self.attend_over_ranks)
        if self.axis.size > 1:
            self._mean_squares = torch.compiler.disable(self._mean_squares)
        if self.spec.dropout:
            self.attend_with_dropout = torch.compiler.disable(self.attend_with_dropout)

    def forward(self, x: Tensor, context: Context, *, norm: Normed | None = None) -> Tensor:
        """(T, D) -> (T, D): every token sees itself and the earlier ones that it may.

        ``norm`` is applied to x first; then neither its result nor turned queries and keys are kept
        for the backward.
        """
        batch, sequence = context.positions_BS.shape
        read = partial(self.qkv, tokens=batch * sequence)
        qkv = read(x) if norm is None else between(norm, x, read)
        qkv = qkv.view(batch, sequence, self.heads + 2 * self.kv_heads, -1)
        # Means over tp are kept: what is computed again must not communicate.
        means = self._mean_squares(qkv) if self.norms_width else None
        turn = partial(self._turn, means=means, context=context)
        mix = partial(self._mix, qkv, context=context)
        mixed = mix(turn(qkv)) if norm is None else between(turn, qkv, mix)
        return self.out(mixed.reshape(batch * sequence, -1))

    @property
    def norms_width(self) -> bool:
        """Whether queries and keys are normed over all heads together."""
        return self.spec.qk_norm is not None and self.spec.qk_norm_over == "width"

    def _mean_squares(self, qkv: Tensor) -> Tensor:
        """Means (B, S, 2) over the heads of all ranks; collective over tp."""
        return mean_squares(qkv[:, :, : self.heads + self.kv_heads], self.heads, self.axis)

    def _turn(self, qkv: Tensor, means: Tensor | None, context: Context) -> Tensor:
        """Queries and keys (B, S, H/t + G/t, K), normed and turned."""
        qk = qkv[:, :, : self.heads + self.kv_heads]
        if self.spec.qk_norm is not None:
            q, k = qk.split((self.heads, self.kv_heads), dim=2)
            of_q, of_k = ((), ()) if means is None else ((m,) for m in means.unbind(-1))
            qk = torch.cat([self.q_norm(q, *of_q), self.k_norm(k, *of_k)], 2)
        if (rope := self.spec.rope) is not None:
            cos, sin = self._angles(context, rope)
            qk = rotate(qk, cos, sin, interleaved=rope.interleaved)  # both at once
        return qk.to(qkv.dtype)

    def _mix(self, qkv: Tensor, qk: Tensor, context: Context) -> Tensor:
        """Values (B, S, H/t, K), mixed as queries and keys say."""
        q, k = qk.split((self.heads, self.kv_heads), dim=2)
        return self.mix(q, k, qkv[:, :, self.heads + self.kv_heads :], context)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Values of the tokens that each token sees, mixed by their scores.

        Args:
            q: turned queries (B, S, H/t, K).
            k: turned keys (B, S, G/t, K).
            v: values (B, S, G/t, K).
            context: the micro-batch.

        Returns:
            (B, S, H/t, K).
        """
        spec, cache = self.spec, context.cache
        if cache is not None:
            cache.extend(self.layer, k, v, context.positions_BS)
            if cache.used > q.shape[1]:
                window, places = spec.window, context.positions_BS
                seen = context.once(("seen", window), lambda: cache.seen(places, window))
                return cache.attend(self.layer, q, seen, spec.factor)
        if context.cut is not None:
            return self.attend_over_ranks(q, k, v, context)
        if spec.dropout:
            return self.attend_with_dropout(q, k, v, context)
        return attend(q, k, v, self._sight(context), scale=spec.factor, backend=spec.backend)

    def attend_over_ranks(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """``attend_cut`` with this layer's dropout: (B, S, H/t, K).

        Args:
            q: (B, S, H/t, K), normed and turned.
            k: (B, S, G/t, K), the same.
            v: (B, S, G/t, K).
            context: the micro-batch, whose rows are cut. Collective over the axis that cuts them.
        """
        spec, sight, dropout = self.spec, self._sight(context), self._dropout(context)
        plain = spec.backend == "plain"
        return attend_cut(q, k, v, sight, spec.factor, plain=plain, dropout=dropout)

    def attend_with_dropout(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """``attend`` with this layer's dropout, in a step that has any: (B, S, H/t, K).

        Args:
            q: (B, S, H/t, K), normed and turned.
            k: (B, S, G/t, K), the same.
            v: (B, S, G/t, K).
            context: the micro-batch.
        """
        spec, sight, dropout = self.spec, self._sight(context), self._dropout(context)
        return attend(q, k, v, sight, scale=spec.factor, backend=spec.backend, dropout=dropout)

    def _dropout(self, context: Context) -> Dropout | None:
        first_head = self.axis.rank * self.heads
        return dropout_of(context, self.spec.dropout, self.layer, first_head)

    def _angles(self, context: Context, rope: Rope) -> tuple[Tensor, Tensor]:
        width, theta, scaling = self.turned, rope.theta, rope.scaling
        return context.once(
            ("angles", width, theta, scaling),
            lambda: rotary_angles(context.positions_BS, width, theta, scaling),
        )

    def _sight(self, context: Context) -> Sight:
        return Sight(context, self.spec.window, self.spec.separate_documents)
