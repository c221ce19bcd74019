"""Mamba-2's mixer (Dao and Gu, arXiv 2405.21060): a convolution and a scan of heads, gated.

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden, H heads of P features, G groups
of heads that share B and C, N features of a state, W width of the convolution; ``/t`` is divided by
tp size, where a group that several ranks share is whole on each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kenotron_cp import AttentionWay, Cut
from kenotron_dist import Roles, declare_roles
from kenotron_dist.init import Constant, Initializer
from kenotron_dist.placement import Chunk, Placements, Shard
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.gated_norm import GatedGroupNorm
from kenotron_models.part import Normed
from kenotron_models.recurrent import Opened, Recurrent, Scan, project
from kenotron_models.recurrent_spec import RecurrentSpec, sent_by_states, state_dtype
from kenotron_models.scan_kernels import check_kernel, structured_scan_kernel
from kenotron_models.selective_scan import Constants
from kenotron_models.short_convolution import ShortConvolution, convolution_init
from kenotron_models.ssd import CHUNK, structured_scan
from kenotron_models.state_init import LogOfPlace


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """A state space of heads."""

    name: ClassVar[str] = "mamba2"
    heads: int
    """H."""
    head_dim: int
    """P, features of a head."""
    groups: int = 1
    """G; divides H."""
    state: int = 128
    """N."""
    conv_bias: bool = True
    """The convolution has a bias."""
    bias: bool = False
    """Input and output projection have one."""
    step_limits: tuple[float, float] = (0.0, float("inf"))
    """Smallest and largest step."""
    eps: float = 1e-5
    """Added to the mean square inside the gated norm."""
    chunk: int = CHUNK
    """Tokens that are computed as one; the numbers differ by rounding only."""

    def build(self, width: int, build: Build, layer: int = 0) -> Mamba2:
        """Make the module; see ``PartSpec``."""
        return Mamba2(self, width, build, layer=layer)

    @property
    def features(self) -> int:
        """H P, features of all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.features + 2 * self.groups * self.state

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count operations of convolution, gate and scan: scores within chunks, and states."""
        seen = min(self.chunk, sequence)
        seen = (seen + 1) // 2 if causal else seen
        scores = 2 * self.groups * self.state * seen + 2 * self.features * seen
        token = scores + 4 * self.features * self.state + 8 * self.features
        return batch * sequence * (token + 2 * self.width * self.convolved)

    def cost(self, width: int) -> int:
        """Count projections, convolution and scan."""
        made = 2 * self.features + 2 * self.groups * self.state + self.heads
        scan = self.features * (2 * self.state + self.chunk // 2)
        return width * (made + self.features) + self.width * self.convolved + scan

    def first_values(self, name: str) -> Initializer | None:
        """Return how a parameter of the module begins; None: by its role."""
        found: dict[str, Initializer] = {
            "A_log": LogOfPlace(),
            "D": Constant(1.0),
            "dt_bias": self.steps,
            "conv.weight": convolution_init(self.width, name),
        }
        return found.get(name)

    def sent_over_sequence(
        self, rows: int, cut: Cut, way: AttentionWay, *, tp: int, dtype: torch.dtype
    ) -> tuple[int, int]:
        """Return the bytes of states and of tokens that leave a rank; see ``SendsOverSequence``."""
        heads, groups = self.heads // tp, max(self.groups // tp, 1)
        channels = heads * self.head_dim + 2 * groups * self.state
        floats = heads * (self.head_dim * self.state + 1)
        sent = sent_by_states(rows, cut, floats, (self.width - 1, channels), dtype)
        return sent, sent


class Mamba2(Recurrent):
    """Heads are cut over tp; with more ranks than groups, each group's B and C live on several.

    ``in_proj`` is z, x, B, C and the steps, one after the other.

    ``Recurrent`` has the arguments.

    Raises:
        ValueError: the axis does not divide H, or groups and axis do not divide one another.
    """

    in_shards = True

    def __init__(self, spec: Mamba2Spec, width: int, build: Build, *, layer: int = 0) -> None:
        check_heads(spec, build)
        shared = Chunk(spec.groups * spec.state, parts=spec.groups)
        chunks = (Chunk(spec.features), shared, shared)
        conv = ShortConvolution(
            spec.convolved, spec.width, build, bias=spec.conv_bias, chunks=chunks
        )
        super().__init__(conv, layer, separate_documents=spec.separate_documents)
        if not build.shapes_only:
            check_kernel(spec.name, spec.kernel, documents=spec.separate_documents)
        self.spec = spec
        self.heads = spec.heads // build.tp.size  # H/t
        self.groups = max(spec.groups // build.tp.size, 1)  # G/t
        rows = spec.features + spec.convolved + spec.heads
        every = (Chunk(spec.features), *chunks, Chunk(spec.heads))
        self.in_proj = build.column(width, rows, bias=spec.bias, chunks=every)
        where = {"device": build.device, "dtype": state_dtype(build)}
        self.A_log = nn.Parameter(torch.zeros(self.heads, **where))  # (H/t,)
        self.D = nn.Parameter(torch.ones(self.heads, **where))  # (H/t,)
        self.dt_bias = nn.Parameter(torch.zeros(self.heads, **where))  # (H/t,)
        self.norm = GatedGroupNorm(spec.features, spec.groups, spec.eps, build)
        self.out_proj = build.row(spec.features, width, bias=spec.bias)
        cut = Shard(build.tp.name, 0)
        self.placements: Placements = {"A_log": cut, "D": cut, "dt_bias": cut}
        self.roles: Roles = {"A_log": "state", "D": "state", "dt_bias": "state"}
        declare_roles(self.out_proj, weight="residual")

    @property
    def adds_inside(self) -> bool:
        """See ``Part``: squares of a group that ranks share."""
        return self.norm.sharers > 1

    def begin(
        self, x: Tensor, context: Context, *, norm: Normed | None = None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return sums of squares (T, G), and what makes the output of the means over all ranks."""
        y, z = self.mixed(x, context, norm)
        again = norm is not None

        def output(means: Tensor) -> Tensor:
            return self.output(y, z, self.means(y, z, added=means), again=again)

        return self.norm.sums(y, z, again=again), output

    def of_sum(self, total: Tensor, ranks: int) -> Tensor:
        """Return the means of all groups (T, G), of their sums ``total`` (T, G)."""
        return total / self.norm.group_size

    def leave_out_of_programs(self) -> None:
        """Loops over chunks, which a compiler would unroll, and other ranks."""
        super().leave_out_of_programs()
        if self.norm.sharers > 1:
            self.norm.means = torch.compiler.disable(self.norm.means)

    def opened(self, x: Tensor, rows: Sequence[int], norm: Normed | None) -> Opened:
        """See ``Recurrent``."""
        features = self.heads * self.spec.head_dim
        made = project(self.in_proj, x, math.prod(rows), norm).view(*rows, -1)
        sizes = (features, made.shape[-1] - features - self.heads, self.heads)
        z, convolved, steps = made.split(sizes, -1)
        return Opened(convolved, steps, z)

    def means(
        self, y: Tensor, gate: Tensor, *, added: Tensor | None = None, again: bool = False
    ) -> Tensor | None:
        """See ``Recurrent``: of groups, (T, G/t). Collective over tp where ranks share one."""
        if added is not None:
            return self.norm.own_group(added)
        return self.norm.means(y, gate, again=again)

    def gated(self, y: Tensor, gate: Tensor, means: Tensor | None) -> Tensor:
        """See ``Recurrent``: (T, C/t) twice."""
        assert means is not None
        return self.norm(y, gate, means)

    def added_after(self, y: Tensor, gate: Tensor) -> Tensor | None:
        """See ``Recurrent``: squares of groups that ranks share, (T, G)."""
        return self.norm.sums(y, gate) if self.adds_inside else None

    def scan(self, x: Tensor, steps: Tensor | None) -> Scan:
        """Return the scan of x, B and C (R, L, C/t) with steps (R, L, H/t)."""
        assert steps is not None  # ``forward`` gives them
        spec, shared = self.spec, self.groups * self.spec.state
        x, b, c = x.split((self.heads * spec.head_dim, shared, shared), -1)
        b, c = (each.unflatten(-1, (self.groups, -1)) for each in (b, c))
        constants = Constants(-torch.exp(self.A_log), self.D, self.dt_bias)
        x = x.unflatten(-1, (self.heads, -1))
        return partial(
            structured_scan, x, steps, b, c, constants, limits=spec.step_limits, chunk=spec.chunk
        )

    def whole_rows(self, x: Tensor, steps: Tensor | None, goes_on: Tensor | None) -> Tensor:
        """Return outputs (R, L, ...) of x (R, L, C/t), by the kernel that was chosen.

        ``steps`` (R, L, ...) and ``goes_on`` (R, L), bool, are as for the plain scan.
        """
        if self.spec.kernel == "plain" or x.is_meta:
            return super().whole_rows(x, steps, goes_on)
        scan: Any = self.scan(x, steps)
        return structured_scan_kernel(*scan.args, **scan.keywords, goes_on=goes_on)

    def decay(self, elapsed: Tensor) -> Tensor:
        """Return the factor of a state (R, H/t, 1, 1), of ``elapsed`` (R, H/t)."""
        return torch.exp(elapsed * -torch.exp(self.A_log))[..., None, None]


def check_heads(spec: Mamba2Spec, build: Build) -> None:
    """Raise ValueError where tp cannot cut heads or groups."""
    size, name = build.tp.size, build.tp.name
    if spec.heads % size:
        raise ValueError(
            f"cannot split {spec.heads} heads over {size} {name} ranks: choose a tensor-parallel "
            "size that divides num_heads"
        )
    if spec.groups % size and size % spec.groups:
        raise ValueError(
            f"cannot split {spec.groups} groups over {size} {name} ranks: n_groups and the "
            "tensor-parallel size must divide one another"
        )
