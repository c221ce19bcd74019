"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; as in V3, arXiv 2412.19437).

Keys and values of all heads are made of one narrow latent of each token; positions turn a few
further features of the queries, and one key of as many features that all heads share. Latents are
whole on every rank of tp, heads are cut.

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden, H heads, ``/t`` is divided by tp
size. Of a head: N features that do not turn, R that do, K = N + R, V features of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Roles, declare_roles
from kenotron_dist.autograd import all_gather_from, copy_to
from kenotron_dist.placement import Chunk, Partial, Placements
from kenotron_models.attention import Attention, AttentionSpec
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.norm import NormSpec
from kenotron_models.part import Normed
from kenotron_models.recompute import between
from kenotron_models.rope import rotate


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Latent attention; ``head_dim`` is K, and there are as many key heads as query heads."""

    turned: int
    """R, features of a head that positions turn."""
    value_features: int
    """V, features of a value; at most K."""
    kv_rank: int
    """Features of the latent of keys and values."""
    q_rank: int | None = None
    """Features of the latent of queries; None: they are made of the token itself."""
    latent_norm: NormSpec = NormSpec()
    """Kind of the norm of latents."""

    def build(self, width: int, build: Build, layer: int = 0) -> LatentAttention:
        """Make the module; see ``PartSpec``."""
        return LatentAttention(self, width, build, layer=layer)

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count operations of scores and of mixing values; see ``AttentionSpec``."""
        whole = super().mixing_flops(batch, sequence, causal=causal)
        return whole * (self.head_dim + self.value_features) // (2 * self.head_dim)

    def cost(self, width: int) -> int:
        """Count the products of its matrices."""
        queries = self.heads * self.head_dim
        q = queries * width if self.q_rank is None else self.q_rank * (width + queries)
        made = self.heads * (self.head_dim - self.turned + self.value_features)
        kv = (self.kv_rank + self.turned) * width + self.kv_rank * made
        return q + kv + self.heads * self.value_features * width


class LatentAttention(Attention):
    """``kv_a``, ``kv_norm``, ``kv_b`` and ``out``; ``q``, or ``q_a``, ``q_norm`` and ``q_b``.

    Arguments and errors as those of ``Attention``.
    """

    def __init__(
        self, spec: LatentAttentionSpec, width: int, build: Build, *, layer: int = 0
    ) -> None:
        nn.Module.__init__(self)
        self.prepare_heads(spec, build, layer)
        self.turned = spec.turned
        self.latent, self.sequence_parallel = spec, build.sequence_parallel
        heads, kept = spec.heads, spec.head_dim - spec.turned
        queries = heads * spec.head_dim
        of_heads = (Chunk(queries, parts=heads),)
        if spec.q_rank is None:
            self.q = build.column(width, queries, bias=spec.qkv_bias, chunks=of_heads)
        else:
            self.q_a = WholeLinear(width, spec.q_rank, build, bias=spec.qkv_bias)
            self.q_norm = spec.latent_norm.build(spec.q_rank, build)
            self.q_b = build.column(spec.q_rank, queries, chunks=of_heads)
        self.kv_a = WholeLinear(width, spec.kv_rank + spec.turned, build, bias=spec.qkv_bias)
        self.kv_norm = spec.latent_norm.build(spec.kv_rank, build)
        made = heads * (kept + spec.value_features)
        self.kv_b = build.column(spec.kv_rank, made, chunks=(Chunk(made, parts=heads),))
        self.out = build.row(heads * spec.value_features, width, bias=spec.out_bias)
        declare_roles(self.out, weight="residual")

    @property
    def adds_inside(self) -> bool:
        """See ``Part``."""
        return False

    def forward(self, x: Tensor, context: Context, *, norm: Normed | None = None) -> Tensor:
        """(T, D) -> (T, D); see ``Attention``."""
        q, k, v, gate = self.heads_of(x, context, norm=norm)
        return self.output(self.mix(q, k, v, context), gate)

    def heads_of(
        self, x: Tensor, context: Context, *, norm: Normed | None = None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return queries, keys and values (B, S, H/t, K) of tokens x (T, D); see ``Attention``."""
        spec, (batch, sequence) = self.latent, context.positions_BS.shape
        tokens = batch * sequence
        if spec.q_rank is None:
            x = x if norm is None else norm(x)
            q, latent = self.q(x, tokens=tokens), self.kv_a(x)
        else:
            both = self._latents(x) if norm is None else between(norm, x, self._latents)
            q_latent, latent = both.split((spec.q_rank, spec.kv_rank + spec.turned), -1)
            q = self.q_b(self.q_norm(q_latent), tokens=tokens)
        narrow, shared = latent.split((spec.kv_rank, spec.turned), -1)
        kv = self.kv_b(self.kv_norm(narrow), tokens=tokens)
        heads = (batch, sequence, self.heads, -1)
        shared = self._of_all_heads(shared, tokens)
        return *self._turned(q.view(heads), shared, kv.view(heads), context), None

    def output(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """Return the result (T, D) of mixed values (B, S, H/t, K)."""
        return super().output(mixed[..., : self.latent.value_features], gate)

    def _latents(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_a(x), self.kv_a(x)], -1)

    def _of_all_heads(self, shared: Tensor, tokens: int) -> Tensor:
        """The key that heads share, (T, R): its gradient is summed over the heads of all ranks."""
        if self.sequence_parallel:
            return all_gather_from(shared, self.axis)[:tokens]
        return copy_to(shared, self.axis)

    def _turned(
        self, q: Tensor, shared: Tensor, kv: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, S, H/t, K), shared (T, R), kv (B, S, H/t, N + V) -> three of (B, S, H/t, K)."""
        spec = self.latent
        kept = spec.head_dim - spec.turned
        q_kept, q_turned = q.split((kept, spec.turned), -1)
        k_kept, v = kv.split((kept, spec.value_features), -1)
        k_turned = shared.view(*q.shape[:2], 1, spec.turned)
        if (rope := spec.rope) is not None:
            cos, sin = self._angles(context, rope)
            q_turned, k_turned = (
                rotate(each, cos, sin, interleaved=rope.interleaved).to(q.dtype)
                for each in (q_turned, k_turned)
            )
        q = torch.cat([q_kept, q_turned], -1)
        k = torch.cat([k_kept, k_turned.expand(*k_kept.shape[:3], -1)], -1)
        return q, k, F.pad(v, (0, spec.head_dim - spec.value_features))  # kernels want equal widths


class WholeLinear(nn.Linear):
    """A linear layer that every rank of tp holds whole, for tokens between two cut layers."""

    def __init__(self, inputs: int, outputs: int, build: Build, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias, **build.storage)
        self.roles: Roles = {"weight": "hidden"}
        self.placements: Placements = {}
        if build.sequence_parallel:  # each rank sees its own tokens
            names = ("weight", "bias") if bias else ("weight",)
            self.placements = dict.fromkeys(names, Partial(build.tp.name))
