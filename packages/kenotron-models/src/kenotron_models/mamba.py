"""Mamba's mixer (Gu and Dao, arXiv 2312.00752): a convolution and a selective scan, gated.

Shapes: B batch, S sequence, T = B * S flattened tokens, D hidden, C channels, N features of a
channel's state, R rank of the steps, W width of the convolution; ``/t`` is divided by tp size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_cp import AttentionWay, Cut
from kenotron_dist import Roles, declare_roles
from kenotron_dist.autograd import copy_to
from kenotron_dist.init import Constant, Initializer, Uniform
from kenotron_dist.placement import Chunk, Placements, Shard
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.norm import NormSpec
from kenotron_models.part import Normed
from kenotron_models.recurrent import Opened, Recurrent, Scan, project
from kenotron_models.recurrent_spec import RecurrentSpec, sent_by_states, state_dtype
from kenotron_models.scan_kernels import check_kernel, selective_scan_kernel
from kenotron_models.selective_scan import Constants, selective_scan
from kenotron_models.short_convolution import ShortConvolution, convolution_init, local_size
from kenotron_models.state_init import LogOfPlace
from kenotron_tp import RowParallelLinear, matmul


@dataclass(frozen=True, kw_only=True)
class MambaSpec(RecurrentSpec):
    """A selective state space."""

    name: ClassVar[str] = "mamba"
    channels: int
    """C."""
    state: int = 16
    """N."""
    step_rank: int
    """R."""
    conv_bias: bool = True
    """The convolution has a bias."""
    bias: bool = False
    """Input and output projection have one."""
    inner_norm: NormSpec | None = None
    """Steps of rank R, B and C are normed (Jamba); None: they are not."""
    step_scale: float = 1.0
    """Factor of the first weights of the projection to steps, next to 1/sqrt(R)."""
    step_init: Literal["random", "constant"] = "random"
    """Initialisation of these: drawn, or all the same."""

    def build(self, width: int, build: Build, layer: int = 0) -> Mamba:
        """Make the module; see ``PartSpec``."""
        return Mamba(self, width, build, layer=layer)

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count operations of convolution, scan and gate: 9 for each feature of a state."""
        return batch * sequence * self.channels * (2 * self.width + 9 * self.state + 8)

    def cost(self, width: int) -> int:
        """Count projections, convolution and scan."""
        made = 2 * self.step_rank + 2 * self.state
        return self.channels * (3 * width + made + self.width + 5 * self.state)

    def first_values(self, name: str) -> Initializer | None:
        """Return how a parameter of the module begins; None: by its role."""
        bound = self.step_scale * self.step_rank**-0.5
        found: dict[str, Initializer] = {
            "A_log": LogOfPlace(),
            "D": Constant(1.0),
            "dt_proj.bias": self.steps,
            "dt_proj.weight": Uniform(bound) if self.step_init == "random" else Constant(bound),
            "conv.weight": convolution_init(self.width, name),
        }
        return found.get(name)

    def sent_over_sequence(
        self, rows: int, cut: Cut, way: AttentionWay, *, tp: int, dtype: torch.dtype
    ) -> tuple[int, int]:
        """Return the bytes of states and of tokens that leave a rank; see ``SendsOverSequence``."""
        channels = self.channels // tp
        floats = 2 * channels * self.state
        sent = sent_by_states(rows, cut, floats, (self.width - 1, channels), dtype)
        return sent, sent


class StepProjection(nn.Module):
    """From steps of rank R to steps of channels; the bias is added in the scan, in fp32.

    ``weight`` (C/t, R), ``bias`` (C/t,) in fp32. Inputs are the same on all tp ranks; who makes
    them sums their gradient.
    """

    def __init__(self, spec: MambaSpec, build: Build) -> None:
        super().__init__()
        own = local_size(Chunk(spec.channels), build.tp.size, "channels")
        self.weight = nn.Parameter(torch.empty(own, spec.step_rank, **build.storage))
        self.bias = nn.Parameter(torch.zeros(own, device=build.device, dtype=state_dtype(build)))
        self.roles: Roles = {"weight": "hidden", "bias": "state"}
        cut = Shard(build.tp.name, 0)
        self.placements: Placements = {"weight": cut, "bias": cut}
        if not self.weight.is_meta:
            nn.init.uniform_(self.weight, -(spec.step_rank**-0.5), spec.step_rank**-0.5)

    def forward(self, steps: Tensor) -> Tensor:
        """(..., R) -> (..., C/t), without the bias."""
        return matmul(steps, self.weight)


class Mamba(Recurrent):
    """Channels are cut over tp: ``in_proj`` (2C, D) is x, then z; ``x_proj`` sums over tp.

    ``Recurrent`` has the arguments.

    Raises:
        ValueError: the axis does not divide C, or the kernel cannot be used.
    """

    in_shards = True

    def __init__(self, spec: MambaSpec, width: int, build: Build, *, layer: int = 0) -> None:
        channels, documents = spec.channels, spec.separate_documents
        conv = ShortConvolution(channels, spec.width, build, bias=spec.conv_bias)
        super().__init__(conv, layer, separate_documents=documents)
        if not build.shapes_only:
            check_kernel(spec.name, spec.kernel, documents=spec.separate_documents)
        self.spec, self.axis = spec, build.tp
        both = (Chunk(channels), Chunk(channels))
        self.in_proj = build.column(width, 2 * channels, bias=spec.bias, chunks=both)
        made = spec.step_rank + 2 * spec.state
        self.x_proj = RowParallelLinear(channels, made, build.tp, **build.storage)
        self.dt_proj = StepProjection(spec, build)
        if (inner := spec.inner_norm) is not None:  # of what is the same on all ranks of tp
            self.dt_norm = inner.build(spec.step_rank, build, partial=False)
            self.b_norm = inner.build(spec.state, build, partial=False)
            self.c_norm = inner.build(spec.state, build, partial=False)
        own = local_size(Chunk(channels), build.tp.size, "channels")
        where = {"device": build.device, "dtype": state_dtype(build)}
        self.A_log = nn.Parameter(torch.zeros(own, spec.state, **where))  # (C/t, N)
        self.D = nn.Parameter(torch.ones(own, **where))  # (C/t,)
        self.out_proj = build.row(channels, width, bias=spec.bias)
        cut = Shard(build.tp.name, 0)
        self.placements: Placements = {"A_log": cut, "D": cut}
        self.roles: Roles = {"A_log": "state", "D": "state"}
        declare_roles(self.out_proj, weight="residual")

    def opened(self, x: Tensor, rows: Sequence[int], norm: Normed | None) -> Opened:
        """See ``Recurrent``."""
        xz = project(self.in_proj, x, math.prod(rows), norm)
        x, z = xz.view(*rows, -1).chunk(2, -1)
        return Opened(x, None, z)

    def gated(self, y: Tensor, gate: Tensor, means: Tensor | None) -> Tensor:
        """See ``Recurrent``: (T, C/t) twice."""
        return y * F.silu(gate)

    def scan(self, x: Tensor, steps: Tensor | None) -> Scan:
        """Return the selective scan of x (R, L, C/t). Collective over tp: the sum of ``x_proj``.

        With ``steps``, of rank R, B and C (R, L, R + 2 N), no rank sends anything.
        """
        if steps is None:
            made = self.of_sum(self.x_proj(x), self.axis.size)
            steps = copy_to(made, self.axis)  # each rank's channels use all of it
        low, b, c = steps.split((self.spec.step_rank, self.spec.state, self.spec.state), -1)
        constants = Constants(-torch.exp(self.A_log), self.D, self.dt_proj.bias)
        return partial(selective_scan, x, self.dt_proj(low), b, c, constants)

    def added_before(self, x: Tensor) -> Tensor | None:
        """See ``Recurrent``: the product with ``x_proj``, (R, L, R + 2 N)."""
        return self.x_proj(x)

    @property
    def adds_inside(self) -> bool:
        """See ``Part``: the result of ``x_proj``."""
        return True

    def begin(
        self, x: Tensor, context: Context, *, norm: Normed | None = None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the product (B, S, R + 2 N) with ``x_proj``, and what makes the output of the sum.

        Rows are whole, and there is no cache. What ``forward`` computes again of convolution and
        gate is kept.
        """
        x, _, z = self.opened(x, context.positions_BS.shape, norm)
        x, goes_on = self.convolved(x, context)

        def output(made: Tensor) -> Tensor:
            y = self.scan(x, made)(goes_on=goes_on).y
            return self.output(y.flatten(0, 1), z.flatten(0, 1), None)

        return self.x_proj(x), output

    def of_sum(self, total: Tensor, ranks: int) -> Tensor:
        """Return the steps of rank R, B and C, normed if they are, of ``total`` (..., R + 2 N)."""
        if self.spec.inner_norm is None:
            return total
        low, b, c = total.split((self.spec.step_rank, self.spec.state, self.spec.state), -1)
        return torch.cat([self.dt_norm(low), self.b_norm(b), self.c_norm(c)], -1)

    def whole_rows(self, x: Tensor, steps: Tensor | None, goes_on: Tensor | None) -> Tensor:
        """Return outputs (R, L, ...) of x (R, L, C/t), by the kernel that was chosen.

        ``steps`` (R, L, ...) and ``goes_on`` (R, L), bool, are as for the plain scan.
        """
        if self.spec.kernel == "plain" or x.is_meta:
            return super().whole_rows(x, steps, goes_on)
        scan: Any = self.scan(x, steps)
        return selective_scan_kernel(*scan.args)

    def decay(self, elapsed: Tensor) -> Tensor:
        """Return the factor of a state (R, C/t, N), of ``elapsed`` (R, C/t)."""
        return torch.exp(elapsed[..., None] * -torch.exp(self.A_log))
