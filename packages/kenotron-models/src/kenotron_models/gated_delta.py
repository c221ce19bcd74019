"""The mixer of Gated DeltaNet (Yang et al., arXiv 2412.06464), with Qwen3-Next's projections.

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden, G key heads of K features, H
value heads of V features (H / G of them read one key head), W width of the convolution, C channels
of it; R pieces of rows of L tokens each; ``/t`` is divided by tp size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_cp import AttentionWay, Cut
from kenotron_dist import Roles, declare_roles
from kenotron_dist.init import Initializer
from kenotron_dist.placement import Chunk, Placements, Shard
from kenotron_models.build import Build
from kenotron_models.delta_rule import Delta, delta_rule, state_map
from kenotron_models.norm import RMSNorm
from kenotron_models.part import Normed
from kenotron_models.recompute import whole
from kenotron_models.recurrent import Opened, Recurrent, Scan, project
from kenotron_models.recurrent_spec import RecurrentSpec, sent_by_states, state_dtype
from kenotron_models.scan_kernels import check_kernel, delta_rule_kernel
from kenotron_models.selective_scan import Scanned
from kenotron_models.short_convolution import ShortConvolution, convolution_init
from kenotron_models.state_init import LogOfDraw

EPS = 1e-6
"""Added to the squared length of queries and keys."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec(RecurrentSpec):
    """A gated delta rule."""

    name: ClassVar[str] = "gated_delta"
    key_heads: int
    """G."""
    value_heads: int
    """H; a multiple of G."""
    key_dim: int
    """K."""
    value_dim: int
    """V."""
    eps: float = 1e-6
    """Of the norm of each value head's output."""
    decays: LogOfDraw = LogOfDraw(0.01, 16.0)
    """Initialisation of the logarithms of decays."""

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
        self, rows: int, cut: Cut, way: AttentionWay, *, tp: int, dtype: torch.dtype
    ) -> tuple[int, int]:
        """Return the bytes of states and of tokens that leave a rank; see ``SendsOverSequence``."""
        floats = self.value_heads // tp * self.key_dim * (self.key_dim + self.value_dim)
        sent = sent_by_states(rows, cut, floats, (self.width - 1, self.channels // tp), dtype)
        return sent, sent


class GatedDelta(Recurrent):
    """Key heads, and the value heads that read them, are cut over tp.

    ``in_proj`` is for each key head its query, its key, the values and the gates of its value
    heads; after all of them for each key head the shares and the steps of its value heads.

    ``Recurrent`` has the arguments.

    Raises:
        ValueError: the axis does not divide G.
    """

    in_shards = True

    def __init__(self, spec: GatedDeltaSpec, width: int, build: Build, *, layer: int = 0) -> None:
        ranks = build.tp.size
        if spec.key_heads % ranks:
            raise ValueError(
                f"cannot split {spec.key_heads} key heads of a gated delta rule over {ranks} "
                f"{build.tp.name} ranks: choose a tensor-parallel size that divides them"
            )
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        convolved = (Chunk(keys), Chunk(keys), Chunk(values))
        conv = ShortConvolution(spec.channels, spec.width, build, bias=False, chunks=convolved)
        super().__init__(conv, layer, separate_documents=spec.separate_documents)
        if not build.shapes_only:
            check_kernel(spec.name, spec.kernel, documents=spec.separate_documents)
        self.spec = spec
        self.key_heads, self.value_heads = spec.key_heads // ranks, spec.value_heads // ranks
        chunks = (Chunk(2 * keys + 2 * values), Chunk(2 * spec.value_heads))
        self.in_proj = build.column(width, sum(each.size for each in chunks), chunks=chunks)
        where = {"device": build.device, "dtype": state_dtype(build)}
        self.A_log = nn.Parameter(torch.zeros(self.value_heads, **where))  # (H/t,)
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads, **where))  # (H/t,)
        self.norm = RMSNorm(spec.value_dim, spec.eps, build, partial=True)
        self.out_proj = build.row(values, width)
        cut = Shard(build.tp.name, 0)
        self.placements: Placements = {"A_log": cut, "dt_bias": cut}
        self.roles: Roles = {"A_log": "state", "dt_bias": "state"}
        declare_roles(self.out_proj, weight="residual")

    def opened(self, x: Tensor, rows: Sequence[int], norm: Normed | None) -> Opened:
        """See ``Recurrent``."""
        spec = self.spec
        made = project(self.in_proj, x, math.prod(rows), norm).view(*rows, -1)
        each = spec.value_heads // spec.key_heads
        sizes = (spec.key_dim, spec.key_dim, each * spec.value_dim, each * spec.value_dim)
        of_heads, steps = made.split((self.key_heads * sum(sizes), 2 * self.value_heads), -1)
        *qkv, z = of_heads.unflatten(-1, (self.key_heads, -1)).split(sizes, -1)
        return Opened(torch.cat([x.flatten(2) for x in qkv], -1), steps, z)

    def gated(self, y: Tensor, gate: Tensor, means: Tensor | None) -> Tensor:
        """See ``Recurrent``: y (T, H V / t), the gate by key head."""
        scaled = self.norm(y.unflatten(-1, (self.value_heads, -1)))
        scaled = scaled * F.silu(gate.reshape(scaled.shape).to(_wide(y)))
        return scaled.to(y.dtype).flatten(-2)

    def scan(self, x: Tensor, steps: Tensor | None) -> Scan:
        """Return the scan of convolved queries, keys and values (R, L, C/t).

        The backward computes again what is inside chunks.
        """

        def run(
            first: Tensor | None = None, goes_on: Tensor | None = None, real: Tensor | None = None
        ) -> Scanned:
            read = partial(self._read, x, steps, goes_on, real)
            y, state = _again(lambda first: delta_rule(read(), first), first)
            return Scanned(y, state, state)

        return run

    def whole_rows(self, x: Tensor, steps: Tensor | None, goes_on: Tensor | None) -> Tensor:
        """Return outputs (R, L, ...) of x (R, L, C/t), by the kernel that was chosen.

        ``steps`` (R, L, ...) and ``goes_on`` (R, L), bool, are as for the plain scan.
        """
        if self.spec.kernel == "plain" or x.is_meta:
            return super().whole_rows(x, steps, goes_on)
        return delta_rule_kernel(self._read(x, steps, None, None))

    def state_map(
        self, x: Tensor, steps: Tensor | None, goes_on: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the states after pieces when those before are 0, and matrices (R, H/t, K, K)."""
        matrix, last = _again(lambda _: state_map(self._read(x, steps, goes_on, None)), None)
        return last, matrix

    def passed(self, factor: Tensor, state: Tensor) -> Tensor:
        """Return what is left of a state: a matrix (R, H/t, K, K) times it."""
        return factor @ state

    def _read(
        self, x: Tensor, steps: Tensor | None, goes_on: Tensor | None, real: Tensor | None
    ) -> Delta:
        """Return the heads' inputs, of x (R, L, C/t) convolved, steps (R, L, 2 H/t) by key head."""
        assert steps is not None  # ``forward`` gives them
        spec, wide = self.spec, _wide(x)
        each, keys = spec.value_heads // spec.key_heads, self.key_heads * spec.key_dim
        q, k, v = x.split((keys, keys, self.value_heads * spec.value_dim), -1)
        q, k = (_unit(part.unflatten(-1, (self.key_heads, -1)).to(wide)) for part in (q, k))
        q, k = (part.repeat_interleave(each, 2) for part in (q * spec.key_dim**-0.5, k))
        b, a = steps.to(wide).unflatten(-1, (self.key_heads, 2, each)).unbind(-2)
        share = b.flatten(-2).sigmoid()
        decay = -torch.exp(self.A_log) * F.softplus(a.flatten(-2) + self.dt_bias)
        if real is not None:
            share, decay = (part * real[..., None] for part in (share, decay))
        return Delta(q, k, v.unflatten(-1, (self.value_heads, -1)), decay, share, goes_on)


def _again(
    function: Callable[[Tensor | None], tuple[Tensor, Tensor]], first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``function(first)``; the backward computes it again, and nothing inside it is kept."""
    again: Callable[..., Any] = whole
    found: tuple[Tensor, Tensor] = (
        again(function, first) if torch.is_grad_enabled() else function(first)
    )
    return found


def _unit(x: Tensor) -> Tensor:
    """x (..., K) at length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
