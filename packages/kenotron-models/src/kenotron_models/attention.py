"""Causal self-attention with grouped key and value heads (Ainslie et al., arXiv 2305.13245).

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden, H query heads, G kv heads,
K features of a head; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from kenotron_cp import AttentionSize, AttentionWay, Cut, Visibility, attention_traffic
from kenotron_dist import declare_roles
from kenotron_dist.placement import Chunk
from kenotron_models.attention_mix import Mixing, MixingSpec
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.norm import HeadsRMSNorm, NormSpec, mean_squares
from kenotron_models.part import Normed
from kenotron_models.recompute import between
from kenotron_models.rope import rotate


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(MixingSpec):
    """Grouped-query attention; the config of a family has checked its sizes."""

    name: ClassVar[str] = "attention"
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    out_bias: bool = False
    """The output has a bias."""
    qk_norm: NormSpec | None = None
    """Queries and keys are normed before they are turned; None: they are not."""
    qk_norm_over: Literal["head", "width"] = "head"
    """Features that this norm is over: those of each head, or those of all heads of all tp
    ranks."""
    gate: bool = False
    """True: the output of the heads is multiplied by a sigmoid of further query features
    (Qwen3-Next)."""

    @property
    def norms_width(self) -> bool:
        """True where queries and keys are normed over all heads together."""
        return self.qk_norm is not None and self.qk_norm_over == "width"

    def build(self, width: int, build: Build, layer: int = 0) -> Attention:
        """Make the module; see ``PartSpec``."""
        return Attention(self, width, build, layer=layer)

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
        self, rows: int, cut: Cut, way: AttentionWay, *, tp: int, dtype: torch.dtype
    ) -> tuple[int, int]:
        """Return the bytes of keys, or of heads, that leave a rank; see ``SendsOverSequence``."""
        heads, kv_heads = self.heads // tp, max(self.kv_heads // tp, 1)
        size = AttentionSize(rows, heads, kv_heads, self.head_dim, self.head_dim, dtype)
        return attention_traffic(way, size, _one_document(cut.sequence, self.window), cut, 0)

    def cost(self, width: int) -> int:
        """Count the projections as if all heads had their own keys and values; no scores."""
        return (4 + self.gate) * self.heads * self.head_dim * width


@lru_cache(maxsize=16)
def _one_document(sequence: int, window: int | None) -> Visibility:
    """Return the visibility in a row of one document, which makes the tables of each cut once."""
    return Visibility(sequence, window)


class Attention(Mixing[AttentionSpec]):
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

    in_shards = True

    def __init__(self, spec: AttentionSpec, width: int, build: Build, *, layer: int = 0) -> None:
        super().__init__()
        self.prepare_heads(spec, build, layer)
        heads, kv_heads, features = spec.heads, spec.kv_heads, spec.head_dim
        kv = Chunk(kv_heads * features, parts=kv_heads)
        asked = heads * features * (1 + spec.gate)  # of a head: its query, then its gate
        chunks, rows = (Chunk(asked, parts=heads), kv, kv), asked + 2 * kv_heads * features
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

    def forward(self, x: Tensor, context: Context, *, norm: Normed | None = None) -> Tensor:
        """(T, D) -> (T, D): every token sees itself and the earlier ones that it may.

        ``norm`` is applied to x first; then neither its result nor turned queries and keys are kept
        for the backward.
        """
        # Both products are called here: torch.compile breaks at them, and at each call around them.
        read = partial(self.qkv, tokens=context.tokens)
        qkv = read(x) if norm is None else between(norm, x, read)
        qkv, gate, means = self._parts(qkv, context)
        turn = partial(self._turn, means=means, context=context)
        mix = partial(self._mix, qkv, context=context)
        mixed = mix(turn(qkv)) if norm is None else between(turn, qkv, mix)
        return self.out(_gated(mixed, gate))

    def heads_of(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return what is mixed of tokens x (T, D), and what gates the result.

        Returns:
            Queries (B, S, H/t, K) and keys (B, S, G/t, K), normed and turned; values
            (B, S, G/t, K); gates (B, S, H/t, K), or None.
        """
        means, heads = self.begin_heads(x, context)
        return heads(means)

    def begin_heads(self, x: Tensor, context: Context) -> tuple[Tensor | None, Callable[..., Any]]:
        """Return means (B, S, 2) over own heads, and what makes ``heads_of`` of those over all.

        Without norms over all heads means are None.
        """
        qkv, gate, means = self._parts(self.qkv(x, tokens=context.tokens), context)

        def heads(means: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
            q, k = self._turn(qkv, means, context).split((self.heads, self.kv_heads), dim=2)
            return q, k, qkv[:, :, self.heads + self.kv_heads :], gate

        return means, heads

    def output(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """Return the result (T, D) of mixed values and gates (B, S, H/t, K)."""
        return self.out(_gated(mixed, gate))

    def _parts(self, qkv: Tensor, context: Context) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, keys and values (B, S, H/t + 2 G/t, K), gates, and means for their norms."""
        qkv = qkv.view(*context.positions_BS.shape, -1, self.spec.head_dim)
        qkv, gate = self._gate(qkv) if self.spec.gate else (qkv, None)
        # Means over tp are kept: what is computed again must not communicate.
        return qkv, gate, self._mean_squares(qkv) if self.spec.norms_width else None

    def _gate(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values (B, S, H/t + 2 G/t, K), and gates (B, S, H/t, K)."""
        asked = 2 * self.heads
        q, gate = qkv[:, :, :asked].unflatten(2, (-1, 2)).unbind(3)
        return torch.cat([q, qkv[:, :, asked:]], 2), gate

    @property
    def adds_inside(self) -> bool:
        """See ``Part``: means of squares over all heads."""
        return self.spec.norms_width

    def begin(
        self, x: Tensor, context: Context, *, norm: Normed | None = None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return means (B, S, 2) over own heads, and what makes the output of those over all."""
        read = partial(self.qkv, tokens=context.tokens)
        qkv, gate, means = self._parts(read(x) if norm is None else between(norm, x, read), context)
        assert means is not None  # else nothing is added up

        def output(means: Tensor) -> Tensor:
            turn = partial(self._turn, means=means, context=context)
            mix = partial(self._mix, qkv, context=context)
            return self.out(
                _gated(mix(turn(qkv)) if norm is None else between(turn, qkv, mix), gate)
            )

        return means, output

    def of_sum(self, total: Tensor, ranks: int) -> Tensor:
        """Return the means over all heads, of ``total`` (B, S, 2), a sum of ``ranks`` means."""
        return total / ranks

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


def _gated(mixed: Tensor, gate: Tensor | None) -> Tensor:
    """Return mixed values times their gates (B, S, H/t, K), as rows (T, H/t * K)."""
    mixed = mixed if gate is None else mixed * gate.sigmoid()
    return mixed.reshape(mixed.shape[0] * mixed.shape[1], -1)
