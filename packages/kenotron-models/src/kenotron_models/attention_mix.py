"""The computation that all kinds of attention share: mixing values by scores, and its inputs.

Shapes: B batch, S sequence, H query heads, G kv heads, K features of a head; ``/t`` is divided by
tp size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from kenotron_cp import Scoring
from kenotron_dist import declare_roles
from kenotron_dist.placement import Placements, Shard
from kenotron_models.attention_backends import (
    AttentionBackend,
    attend,
    attend_kept,
    check_backend,
    needs_more_than_scale,
    prepare,
)
from kenotron_models.attention_cp import attend_cut, sight_of_rows
from kenotron_models.attention_mask import AttentionMask
from kenotron_models.attention_reference import dropout_of
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.part import Part
from kenotron_models.rope import Rope, rotary_angles


@dataclass(frozen=True, kw_only=True)
class MixingSpec:
    """Options of mixing values by scores; the config of a family has checked its sizes."""

    heads: int
    """H, query heads."""
    kv_heads: int
    """G, key and value heads; divides H."""
    head_dim: int
    """K, features of a head."""
    scale: float | None = None
    """Factor of the scores; None: 1/sqrt(K)."""
    rope: Rope | None = Rope()
    """Rotary embedding of queries and keys; None: they have none."""
    window: int | None = None
    """Tokens that a token sees, itself counted; None: all before it."""
    separate_documents: bool = False
    """A token sees its own document only: they begin where positions do not increase by one."""
    backend: AttentionBackend = "auto"
    """Attention backend; the numbers differ by rounding only. auto: flash_attn where it is
    installed and can run, varlen on CUDA where more than the future is hidden, blocked on the CPU
    where it is faster, else sdpa."""
    dropout: float = 0.0
    """Share of attention's probabilities that is dropped in training."""
    cap: float | None = None
    """Scores s become cap * tanh(s / cap) before what is not seen is hidden; None: they stay."""
    sinks: bool = False
    """Heads have a learned score of no value, which takes its share of every softmax (gpt-oss)."""

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


Spec = TypeVar("Spec", bound=MixingSpec)


class Mixing(Part, Generic[Spec]):
    """A mixer whose tokens see one another by scores; ``sinks`` (H/t,) if there are some."""

    spec: Spec
    reads_cache = True
    cuts_sequence = True

    def prepare_heads(self, spec: Spec, build: Build, layer: int) -> None:
        """Check what it is made of, and say which heads this rank has."""
        axis, heads = build.tp, spec.heads
        if heads % axis.size:
            raise ValueError(
                f"cannot split {heads} attention heads over {axis.size} {axis.name} ranks: "
                "choose a tensor-parallel size that divides num_attention_heads"
            )
        self.spec, self.layer, self.axis = spec, layer, axis
        rope, features = spec.rope, spec.head_dim
        self.turned = features if rope is None else rope.features(features)  # by positions
        self.heads = heads // axis.size  # H/t
        self.first_head = axis.rank * self.heads
        self.kv_heads = max(spec.kv_heads // axis.size, 1)  # G/t
        self.sinks: nn.Parameter | None = None
        if spec.sinks:  # (H/t,)
            self.sinks = nn.Parameter(torch.zeros(self.heads, **build.storage))
            declare_roles(self, sinks="bias")
            self.placements: Placements = {"sinks": Shard(axis.name, 0)}
        scoring = Scoring(spec.factor, spec.cap, self.sinks)
        if not build.shapes_only:
            check_backend(spec.backend, scoring)
        self.outside_programs = spec.dropout > 0 or needs_more_than_scale(scoring)

    def prepare(self, context: Context) -> None:
        """Make what all layers read of the micro-batch, unless it is there; ``forward`` does it.

        To be called before a compiled ``forward``, which is then the same code for all layers.
        """
        if self.spec.rope is not None:
            self._angles(context, self.spec.rope)
        if context.cut is None:
            ordered = self.spec.backend
            inside = ordered != "auto" or not self.outside_programs
            prepare(self._sight(context), ordered if inside else "blocked")
        else:
            sight_of_rows(self._sight(context))

    def leave_out_of_programs(self) -> None:
        """Dropout, whose keys would make a program for each layer and step, and other ranks."""
        self.attend_outside = torch.compiler.disable(self.attend_outside)
        if self.axis.size > 1:
            self._mean_squares = torch.compiler.disable(self._mean_squares)

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
        cache = context.cache
        if cache is not None:
            cache.extend(self.layer, k, v, context.positions_BS)
            if cache.used > q.shape[1]:
                window, places = self.spec.window, context.positions_BS
                seen = context.once(("seen", window), lambda: cache.seen(places, window))
                return attend_kept(q, *cache.kept(self.layer), seen, self._scoring(context))
        if context.cut is not None or self.outside_programs:
            return self.attend_outside(q, k, v, context)
        return self._attend(q, k, v, context)

    def attend_outside(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attend where no program can contain it: (B, S, H/t, K); see ``leave_out_of_programs``.

        Args:
            q: (B, S, H/t, K), normed and turned.
            k: (B, S, G/t, K), the same.
            v: (B, S, G/t, K).
            context: the micro-batch. Collective over the axis that cuts its rows, if they are cut.
        """
        return self._attend(q, k, v, context)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        how = attend if context.cut is None else attend_cut
        scoring = self._scoring(context)
        return how(q, k, v, self._sight(context), scoring, self.spec.backend)

    def _scoring(self, context: Context) -> Scoring:
        spec = self.spec
        dropout = dropout_of(context, spec.dropout, self.layer, self.first_head)
        return Scoring(spec.factor, spec.cap, self.sinks, dropout)

    def _angles(self, context: Context, rope: Rope) -> tuple[Tensor, Tensor]:
        width, theta, scaling = self.turned, rope.theta, rope.scaling
        return context.once(
            ("angles", width, theta, scaling),
            lambda: rotary_angles(context.positions_BS, width, theta, scaling),
        )

    def _sight(self, context: Context) -> AttentionMask:
        return AttentionMask(context, self.spec.window, self.spec.separate_documents)
