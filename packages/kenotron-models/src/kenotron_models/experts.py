"""A mixture of experts as feed-forward: each token is sent to a few of many small ones.

Every rank of a pipeline stage routes its own tokens. Where tp leaves tokens whole, each of its
ranks takes a share of them, and results are gathered. With virtual shards all ranks of tp route all
tokens, and experts compute those of each virtual rank apart (``token_shards``).

Shapes: T flattened tokens, n of this rank, D hidden, E experts, K experts of a token, F features of
an expert, R rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from kenotron_dist import Axis
from kenotron_dist.weight_products import current_backward
from kenotron_ep import DispatchWay, mix_experts
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.expert_capacity import capacity_of, drop_beyond_capacity
from kenotron_models.mlp import MLP, Activation, ClampedSwiGLU, MLPSpec, activated
from kenotron_models.part import Normed, Part
from kenotron_models.recompute import between
from kenotron_models.routed_tokens import routed_places, routed_rows
from kenotron_models.router import Choice, Router, RouterSpec
from kenotron_models.router_jitter import jitter_factors
from kenotron_models.router_losses import LoadSums, router_loss
from kenotron_models.shared_gate import SharedGate
from kenotron_models.stacked_by_source import each_group
from kenotron_models.stacked_linear import StackedLinear
from kenotron_models.token_shards import TokenShards
from kenotron_tp import join_tokens, split_tokens


class Collects(Protocol):
    """A collector of the losses of layers (``kenotron_pp``)."""

    def add(self, scalar: Tensor) -> None:
        """Add to the loss of this micro-batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Experts that tokens are routed to, and a shared one that sees every token."""

    name: ClassVar[str] = "experts"
    router: RouterSpec
    """Rule by which they are chosen."""
    features: int
    """F, inner width of each."""
    gated: bool = True
    """True where they have a gate."""
    activation: Activation | ClampedSwiGLU = "silu"
    """Their activation."""
    bias: bool = False
    """Their matrices have biases."""
    transposed: bool = False
    """Matrices are stored with input features first, and features of gate and up alternate, as in
    gpt-oss."""
    shared_features: int = 0
    """Inner width of the shared expert; 0: there is none."""
    shared_gate: bool = False
    """The shared expert's result is multiplied by a sigmoid of each token."""
    way: Literal["alltoall", "allgather", "auto"] = "alltoall"
    """Method of exchanging tokens with their experts over ep; auto: see ``way_over``. The numbers
    are the same; gradients of tokens that are gathered are equal to rounding."""
    capacity_factor: float | None = None
    """In a training an expert keeps ``ceil(capacity_factor * K * S / E)`` choices of each sample of
    S tokens, and drops later ones (``expert_capacity``); None: all are kept."""

    def build(self, width: int, build: Build, layer: int = 0) -> Experts:
        """Make the module; see ``PartSpec``."""
        return Experts(self, width, build, layer=layer)

    def way_over(self, ranks: int) -> DispatchWay:
        """Return how tokens travel over so many ranks of ep.

        ``auto`` gathers where a token has more experts than there are ranks: it is then sent fewer
        times (``kenotron_ep.exchange_traffic``).
        """
        if self.way != "auto":
            return self.way
        return "allgather" if 1 < ranks < self.router.top_k else "alltoall"

    @property
    def shared(self) -> MLPSpec | None:
        """The shared expert."""
        if not self.shared_features:
            return None
        return MLPSpec(features=self.shared_features, gated=self.gated, activation=self.activation)

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count nothing: all its operations are products with matrices."""
        return 0

    def idle(self, width: int) -> int:
        """Count the elements of the experts that a token is not sent to."""
        unused = self.router.experts - self.router.top_k
        return unused * self._matrices * self.features * width

    def cost(self, width: int) -> int:
        """Count the products of the router, of K experts and of the shared one."""
        shared = 0 if self.shared is None else self.shared.cost(width)
        active = self.router.top_k * self._matrices * self.features * width
        return active + self.router.experts * width + shared

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2


class Experts(Part):
    """``router``, ``gate_up`` (or ``up``) and ``down``; ``shared`` and ``shared_gate`` if any.

    ``forward``: (T, D) -> (T, D), (T/t, D) under sequence parallelism. Collective over ep, and over
    tp where tokens are whole or there is a shared expert.

    Args:
        spec: what it is made of.
        width: D.
        build: how and where.
        layer: its number in the model, from 0.

    Raises:
        ValueError: ep does not divide E, or tp the shared expert's features.
    """

    cuts_sequence = True
    adds_loss = True
    in_shards = True

    def __init__(self, spec: ExpertsSpec, width: int, build: Build, *, layer: int = 0) -> None:
        super().__init__()
        self.spec, self.layer = spec, layer
        self.auxiliary_losses: Collects | None = None
        self.token_shards = TokenShards(build.tp, build.shards) if build.shards > 1 else None
        self.tp = build.tp if self.token_shards is None else Axis.solo(build.tp.name)
        self.ep, self.sequence_parallel = build.ep, build.sequence_parallel
        self.by_source = build.by_source
        whole = build.ep.size == 1 or build.by_source  # tokens are sent at once, each choice
        self.chunks = 1 if whole else build.ep_chunks
        self.way: DispatchWay = "alltoall" if whole else spec.way_over(build.ep.size)
        experts, rows = spec.router.experts, (1 + spec.gated) * spec.features
        self.router = Router(spec.router, width, build)
        how = {"bias": spec.bias, "transposed": spec.transposed}
        # Transposed gates and ups alternate: together they are one matrix.
        fused = (spec.features,) * 2 if spec.gated and not spec.transposed else ()
        first = StackedLinear(experts, width, rows, build, **how, fused=fused)
        self.add_module("gate_up" if spec.gated else "up", first)
        self.down = StackedLinear(experts, spec.features, width, build, role="residual", **how)
        self.shared = None if spec.shared is None else MLP(spec.shared, width, build)
        self.run_shared: Callable[[Tensor, Context], Tensor] | None = None
        """The shared expert as a block with virtual shards calls it; None: as it is."""
        self.shared_gate = SharedGate(width, build) if spec.shared_gate else None

    @property
    def first(self) -> StackedLinear:
        """The matrices that read the block's input."""
        found = self.get_submodule("gate_up" if self.spec.gated else "up")
        assert isinstance(found, StackedLinear)
        return found

    def leave_out_of_programs(self) -> None:
        """All of it: how many rows an expert has is known on the host alone."""
        self.mix = torch.compiler.disable(self.mix)

    def forward(self, x: Tensor, context: Context, *, norm: Normed | None = None) -> Tensor:
        """(T, D) -> (T, D).

        Args:
            x: tokens.
            context: the micro-batch; it keeps what was chosen for a layer that is computed again.
            norm: applied to x first: then neither its result nor activations are kept for the
                backward.
        """
        if norm is None:
            return self.mix(x, context, selective=False)
        return between(norm, x, partial(self.mix, context=context, selective=True))

    def mix(self, normed: Tensor, context: Context, selective: bool) -> Tensor:
        """Return the output of ``forward`` for normed tokens (T, D)."""
        cut = self.tp.size > 1 and not self.sequence_parallel
        own = split_tokens(normed, self.tp) if cut else normed  # (n, D)
        rows = routed_rows(context, len(own), self.tp)
        choice = self._choose(own, context)
        self._add_loss(choice, rows, context)
        batch, experts = len(context.positions_BS), choice.experts_TK
        if rows is not None:
            experts = experts.masked_fill(rows[:, None] == batch, -1)
        kept = self._kept(experts, rows, context)
        if context.loss_weight is not None and current_backward() == -1:  # of a step, and once
            self._count(experts, kept)
        of_all: list[Tensor] = []

        def of_part(part: int, x: Tensor, kept: Tensor, weights: Tensor) -> Tensor:
            return mix_experts(
                x, kept, weights, self.spec.router.experts, self.ep,
                partial(self._compute, selective=selective, part=part), way=self.way,
                chunks=self.chunks, by_source=self.by_source,
                meanwhile=None if part else lambda: of_all.extend(self._shared(normed, context)),
            )  # fmt: skip

        if (shards := self.token_shards) is None:
            y = of_part(0, own, kept, choice.weights_TK)
        else:
            parts = shards.split(own), shards.split(kept, -1), shards.split(choice.weights_TK)
            y = shards.each(of_part, *parts, tokens=len(own))
        if cut:
            y = join_tokens(y, self.tp, context.tokens)
        return sum(of_all, y)

    def _choose(self, own: Tensor, context: Context) -> Choice:
        """Route this rank's tokens (n, D); as in the forward while the backward computes again."""
        name, jitter = f"layers.{self.layer}.router", self.spec.router.jitter
        noise = jitter_factors(own, jitter, context, name, self.tp)
        if not self.computed_again:
            found: Choice = self.router(own, noise=noise)
            return found
        key, again = ("experts", self.layer), current_backward() != -1
        choice: Choice = self.router(own, context.kept[key].long() if again else None, noise)
        context.kept[key] = choice.experts_TK.int()
        return choice

    def _add_loss(self, choice: Choice, rows: Tensor | None, context: Context) -> None:
        """Add the router's loss to that of the micro-batch: its gradient, and 0 to the value."""
        spec, collects, weight = self.spec.router, self.auxiliary_losses, context.loss_weight
        if collects is None or weight is None or not (spec.balance_loss or spec.z_loss):
            return
        batch, sequence = context.positions_BS.shape
        if rows is None:
            rows = torch.arange(len(choice.experts_TK), device=weight.device) // sequence
        axes = [self.tp, *([] if context.cut is None else [context.cut.axis])]
        known: dict[int, LoadSums] = context.kept.setdefault("load sums", {})
        earlier = [sums for layer, sums in known.items() if layer < self.layer]
        loss, sums = router_loss(choice, spec, rows, batch, axes, earlier)
        if sums is not None and spec.balances_all_layers and current_backward() == -1:
            known[self.layer] = sums
        loss = loss * weight
        collects.add(loss - loss.detach())

    def _kept(self, experts: Tensor, rows: Tensor | None, context: Context) -> Tensor:
        """Return the choices (n, K), -1 for those of a training that are beyond the capacity."""
        factor, (number, top_k) = (
            self.spec.capacity_factor,
            (self.spec.router.experts, experts.shape[1]),
        )
        if factor is None or context.loss_weight is None:
            return experts
        cut, sequence, n = context.cut, context.positions_BS.shape[1], len(experts)
        if rows is None:
            rows = torch.arange(n, device=experts.device) // sequence
        return drop_beyond_capacity(
            experts, rows, routed_places(context, n, self.tp), experts=number,
            capacity=capacity_of(factor, top_k, cut.sequence if cut else sequence, number),
            axes=[self.tp, *([] if cut is None else [cut.axis])],
        )  # fmt: skip

    def _count(self, experts: Tensor, kept: Tensor) -> None:
        """Count choices (n, K) before and after a capacity; with virtual shards of own tokens."""
        if (shards := self.token_shards) is not None:
            experts, kept = (torch.cat(shards.split(each, -1)) for each in (experts, kept))
        self.router.count(experts, kept)

    def _compute(self, rows: Tensor, counts: Tensor, *, selective: bool, part: int) -> Tensor:
        """Rows (R, D), grouped by expert, through their experts -> (R, D).

        ``part`` is as in ``StackedLinear``.
        """
        activate = partial(activated, self.spec, alternating=self.spec.transposed)
        if self.by_source:
            activate = partial(each_group, activate, counts=counts)
        y = self.first(rows, counts, part)
        if not selective:
            return self.down(activate(y), counts, part)
        return between(activate, y, partial(self.down, counts=counts, part=part))

    def _shared(self, x: Tensor, context: Context) -> list[Tensor]:
        """Return the shared expert's result (T, D), if there is one, in a list."""
        if self.shared is None:
            return []
        y = (self.run_shared or self.shared)(x, context)
        return [y if self.shared_gate is None else y * self.shared_gate(x)]
