"""The mixer of Gated DeltaNet (Yang et al., arXiv 2412.06464), with Qwen3-Next's projections.

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden, G key heads of K features, H
value heads of V features (H / G of them read one key head), W width of the convolution, P pieces
of a row on this rank; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_cp import Cut, Way
from kenotron_dist import Chunk, Placements, Roles, Shard, declare_roles
from kenotron_dist.init import Initializer
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.delta_rule import Delta, delta_rule, state_map
from kenotron_models.mamba import state_dtype
from kenotron_models.norm import RMSNorm
from kenotron_models.part import Normed, Part
from kenotron_models.recompute import between, whole
from kenotron_models.segments import Segments, segments_of, tokens_since_start
from kenotron_models.short_convolution import ShortConvolution, convolution_init, tokens_before
from kenotron_models.state_init import FirstSteps, LogOfDraw
from kenotron_models.state_passing import entering_states

EPS = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec:
    """A gated delta rule; the config of a family has checked its sizes."""

    name: ClassVar[str] = "gated_delta"
    key_heads: int
    """G."""
    value_heads: int
    """H; a multiple of G."""
    key_dim: int
    """K."""
    value_dim: int
    """V."""
    width: int = 4
    """W, in tokens."""
    eps: float = 1e-6
    """Of the norm of each value head's output."""
    separate_documents: bool = False
    """State and convolution begin again where positions do not increase by one."""
    steps: FirstSteps = FirstSteps(0.001, 0.1, 1e-4)
    """How biases of steps begin."""
    decays: LogOfDraw = LogOfDraw(0.01, 16.0)
    """How logarithms of decays begin."""

    def build(self, width: int, build: Build, layer: int = 0) -> GatedDelta:
        """Make the module; see ``PartSpec``."""
        return GatedDelta(self, width, build, layer=layer)

    @property
    def channels(self) -> int:
        """Features that are convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count operations of convolution and of the recurrence: reading, and writing twice."""
        state = 6 * self.value_heads * self.key_dim * self.value_dim
        return batch * sequence * (2 * self.width * self.channels + state)

    def cost(self, width: int) -> int:
        """Count projections and the recurrence."""
        values = self.value_heads * self.value_dim
        made = self.channels + values + 2 * self.value_heads
        return (made + values) * width + 3 * values * self.key_dim

    def first_values(self, name: str) -> Initializer | None:
        """Return how a parameter of the module begins; None: by its role."""
        found: dict[str, Initializer] = {
            "A_log": self.decays,
            "dt_bias": self.steps,
            "conv.weight": convolution_init(self.width, name),
        }
        return found.get(name)

    def sent_over_sequence(
        self, rows: int, cut: Cut, way: Way, *, tp: int, dtype: torch.dtype
    ) -> tuple[int, int]:
        """Return the bytes of states and of tokens that leave a rank; see ``SendsOverSequence``."""
        pieces = rows * cut.per_rank * (cut.ranks - 1)
        tokens = min(self.width - 1, cut.chunk_length) * self.channels // tp * dtype.itemsize
        states = self.value_heads // tp * self.key_dim * (self.key_dim + self.value_dim) * 4
        return (sent := pieces * (tokens + states)), sent


class GatedDelta(Part):
    """Key heads, and the value heads that read them, are cut over tp.

    ``in_proj`` is for each key head its query, its key, the values and the gates of its value
    heads; after all of them for each key head the shares and the steps of its value heads.

    Args:
        spec: what it is made of.
        width: D.
        build: how and where.
        layer: its number in the model, from 0: the cache depends on it.

    Raises:
        ValueError: the axis does not divide G.
    """

    reads_cache = True
    cuts_sequence = True

    def __init__(self, spec: GatedDeltaSpec, width: int, build: Build, *, layer: int = 0) -> None:
        super().__init__()
        ranks = build.tp.size
        if spec.key_heads % ranks:
            raise ValueError(
                f"cannot split {spec.key_heads} key heads of a gated delta rule over {ranks} "
                f"{build.tp.name} ranks: choose a tensor-parallel size that divides them"
            )
        self.spec, self.layer = spec, layer
        self.key_heads, self.value_heads = spec.key_heads // ranks, spec.value_heads // ranks
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        chunks = (Chunk(2 * keys + 2 * values), Chunk(2 * spec.value_heads))
        self.in_proj = build.column(width, sum(each.size for each in chunks), chunks=chunks)
        convolved = (Chunk(keys), Chunk(keys), Chunk(values))
        self.conv = ShortConvolution(
            spec.channels, spec.width, build, bias=False, chunks=convolved
        )
        constants = {"device": build.device, "dtype": state_dtype(build)}
        self.A_log = nn.Parameter(torch.zeros(self.value_heads, **constants))  # (H/t,)
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads, **constants))  # (H/t,)
        self.norm = RMSNorm(spec.value_dim, spec.eps, build, partial=True)
        self.out = build.row(values, width)
        cut = Shard(build.tp.name, 0)
        self.placements: Placements = {"A_log": cut, "dt_bias": cut}
        self.roles: Roles = {"A_log": "state", "dt_bias": "state"}
        declare_roles(self.out, weight="residual")

    def prepare(self, context: Context) -> None:
        """Make what all layers read of the micro-batch, before a compiled ``forward``."""
        tokens_since_start(context, documents=self.spec.separate_documents)

    def leave_out_of_programs(self) -> None:
        """Loops over chunks, which a compiler would unroll, and other ranks."""
        self.mix = torch.compiler.disable(self.mix)

    def forward(self, x: Tensor, context: Context, *, norm: Normed | None = None) -> Tensor:
        """(T, D) -> (T, D): every token sees itself and the earlier ones of its document.

        ``norm`` is applied to x first; then the projection of its result is kept for the backward,
        and the output before the gate.
        """
        batch, sequence = context.positions_BS.shape
        read = partial(self.in_proj, tokens=batch * sequence)
        made = read(x) if norm is None else between(norm, x, read)
        made = made.view(batch, sequence, -1)
        y = self.mix(made, context, again=norm is not None)  # (B, S, H/t, V)
        gates = self._split(made)[3]

        def gated(y: Tensor) -> Tensor:
            scaled = self.norm(y) * F.silu(gates.to(_wide(y)))
            return scaled.to(y.dtype).reshape(batch * sequence, -1)

        return self.out(gated(y)) if norm is None else between(gated, y, self.out)

    def mix(self, made: Tensor, context: Context, *, again: bool) -> Tensor:
        """Convolve, and read and write the state. Collective over the axis of the cut.

        Args:
            made: the projection (B, S, .).
            context: the micro-batch.
            again: whether the backward computes again what is between it and the result.

        Returns:
            (B, S, H/t, V).
        """
        spec, segments, cache = self.spec, segments_of(context), context.cache
        since = tokens_since_start(context, documents=spec.separate_documents)
        if since is not None:
            since = since.expand(made.shape[:2])
        convolved = torch.cat([part.flatten(2) for part in self._split(made)[:3]], -1)
        if cache is None:
            before = tokens_before(convolved, spec.width - 1, segments)
        else:
            key, padding = (self.layer, "conv"), context.padding_BS
            before = cache.tokens_before(key, convolved, spec.width - 1, padding)
        heads = partial(self._heads, segments=segments, since=since, padding=context.padding_BS)

        def run(made: Tensor, before: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
            return delta_rule(heads(made, before), first)

        def map_of(made: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            return state_map(heads(made, before))

        if cache is not None:
            y, state = run(made, before, cache.state((self.layer, "delta")))
            cache.keep((self.layer, "delta"), state)
            return y
        first, kept = None, whole if again and torch.is_grad_enabled() else _now
        if segments is not None:
            matrix, last = kept(map_of, made, before)
            first = entering_states(last, matrix, segments, apply=torch.matmul)
        y, _ = kept(run, made, before, first)
        return y.reshape(*made.shape[:2], self.value_heads, spec.value_dim)

    def _split(self, made: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, gates, shares and steps (B, S, heads, ...) of the projection."""
        spec, each = self.spec, self.spec.value_heads // self.spec.key_heads
        values = each * spec.value_dim
        sizes = (spec.key_dim, spec.key_dim, values, values)
        of_heads, of_steps = made.split((self.key_heads * sum(sizes), 2 * self.value_heads), -1)
        q, k, v, z = of_heads.unflatten(-1, (self.key_heads, -1)).split(sizes, -1)
        b, a = of_steps.unflatten(-1, (self.key_heads, 2, each)).unbind(-2)
        v, z = (x.reshape(*x.shape[:2], self.value_heads, spec.value_dim) for x in (v, z))
        return q, k, v, z, b.flatten(-2), a.flatten(-2)

    def _heads(
        self,
        made: Tensor,
        before: Tensor,
        *,
        segments: Segments | None,
        since: Tensor | None,
        padding: Tensor | None,
    ) -> Delta:
        """What heads read of pieces (B P, L, ...): convolved queries, keys, values; decays."""
        spec, wide = self.spec, _wide(made)
        pieces = 1 if segments is None else segments.pieces
        rows = made.unflatten(1, (pieces, -1)).flatten(0, 1)  # (B P, L, .)
        places = None if since is None else since.reshape(rows.shape[:2])
        q, k, v, _, b, a = self._split(rows)
        mixed = self.conv(torch.cat([x.flatten(2) for x in (q, k, v)], -1), before, places)
        keys = self.key_heads * spec.key_dim
        q, k, v = F.silu(mixed).split((keys, keys, self.value_heads * spec.value_dim), -1)
        q, k = (_unit(x.unflatten(-1, (self.key_heads, -1)).to(wide)) for x in (q, k))
        each = self.value_heads // self.key_heads
        q, k = ((x * s).repeat_interleave(each, 2) for x, s in ((q, spec.key_dim**-0.5), (k, 1.0)))
        share, decay = b.to(wide).sigmoid(), F.softplus(a.to(wide) + self.dt_bias)
        decay = -torch.exp(self.A_log) * decay
        if padding is not None:
            share, decay = (x.masked_fill(padding[..., None], 0.0) for x in (share, decay))
        goes_on = None if places is None else places > 0
        return Delta(q, k, v.unflatten(-1, (self.value_heads, -1)), decay, share, goes_on)


def _now(function, *inputs):  # type: ignore[no-untyped-def]
    return function(*inputs)


def _unit(x: Tensor) -> Tensor:
    """x (..., K) at length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
