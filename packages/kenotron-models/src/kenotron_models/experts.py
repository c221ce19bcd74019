"""A mixture of experts as feed-forward: each token is sent to a few of many small ones.

Every rank of a pipeline stage routes its own tokens. Where tp leaves tokens whole, each of its
ranks takes a share of them, and results are gathered. With virtual shards all ranks of tp route all
tokens, and experts compute those of each virtual rank apart (``token_shards``). Virtual chunks are
routed and computed one by one; loads and room of experts are those of all tokens.

Shapes: T flattened tokens, n of this rank, D hidden, E experts, K experts of a token, F features of
an expert, R rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kenotron_dist import Axis
from kenotron_dist.weight_products import current_backward
from kenotron_ep import DispatchWay, mix_experts
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.expert_capacity import kept_choices
from kenotron_models.expert_options import ExpertsOptions
from kenotron_models.mlp import MLP, activated
from kenotron_models.part import Normed, Part
from kenotron_models.recompute import between
from kenotron_models.routed_tokens import routed_rows
from kenotron_models.router import Choice, Router
from kenotron_models.router_jitter import jitter_factors
from kenotron_models.router_losses import layer_loss
from kenotron_models.shared_gate import SharedGate
from kenotron_models.stacked_by_source import each_group
from kenotron_models.stacked_linear import StackedLinear
from kenotron_models.token_shards import TokenShards
from kenotron_tp import join_tokens, split_tokens


class Collects(Protocol):
    """A collector of the losses of layers (``kenotron_pp``)."""

    def add(self, scalar: Tensor) -> None:
        """Add a scalar to the loss of this micro-batch."""
        ...


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec(ExpertsOptions):
    """Experts that tokens are routed to, and a shared one that sees every token."""

    name: ClassVar[str] = "experts"

    def build(self, width: int, build: Build, layer: int = 0) -> Experts:
        """Make the module; see ``PartSpec``."""
        return Experts(self, width, build, layer=layer)


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
        self.run_shared: Callable[[MLP, Tensor, Context], Tensor] | None = None
        """Calls the shared expert, or a copy, as a block with virtual shards does; None: as it
        is."""
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
        [y] = self.mix_chunks([self], [normed], [context], context, selective=selective)
        return y

    def mix_chunks(
        self,
        copies: Sequence[Experts],
        xs: Sequence[Tensor],
        contexts: Sequence[Context],
        context: Context,
        *,
        selective: bool = False,
    ) -> list[Tensor]:
        """Return the outputs (n, D) of virtual chunks of this rank's tokens; see ``mix``.

        Args:
            copies: this module as each chunk has it (``copies_by_chunk``).
            xs: normed tokens (n, D) of each.
            contexts: of each.
            context: the micro-batch.
            selective: see ``forward``.
        """
        cut = self.tp.size > 1 and not self.sequence_parallel
        own = [split_tokens(x, self.tp) for x in xs] if cut else xs
        # Every chunk is routed before the room of experts is shared out.
        parts = zip(copies, own, contexts, strict=True)
        choices = [copy._choose(x, part) for copy, x, part in parts]
        kept, found = self._decide(choices, context).chunk(len(xs)), []
        for number, (copy, x, part) in enumerate(zip(copies, xs, contexts, strict=True)):
            of_all: list[Tensor] = []
            compute = partial(copy._compute, selective=selective, chunk=(number, len(xs)))
            y = copy._results(
                own[number], kept[number], choices[number].weights_TK, compute,
                partial(_extend, of_all, copy._shared, x, part),
            )  # fmt: skip
            if cut:
                y = join_tokens(y, self.tp, part.tokens)
            found.append(sum(of_all, y))
        return found

    def _decide(self, choices: Sequence[Choice], context: Context) -> Tensor:
        """Return the experts (n, K) that this rank's tokens are sent to, -1 for none.

        Adds the router's loss, and counts loads. ``choices``: of each chunk of the tokens.
        """
        each = [choice.experts_TK for choice in choices]
        experts = torch.cat(each) if len(each) > 1 else each[0]
        rows = routed_rows(context, len(experts), self.tp)
        if (collects := self.auxiliary_losses) is not None:
            loss = layer_loss(choices, rows, context, self.spec.router, self.layer, self.tp)
            if loss is not None:
                collects.add(loss - loss.detach())  # its gradient, and 0 to the value
        if rows is not None:
            experts = experts.masked_fill(rows[:, None] == len(context.positions_BS), -1)
        room = self.spec.capacity_factor, self.spec.router.experts
        kept = kept_choices(experts, rows, context, *room, self.tp)
        if context.loss_weight is not None and current_backward() == -1:  # of a step, and once
            self._count(experts, kept)
        return kept

    def _results(
        self,
        x: Tensor,
        kept: Tensor,
        weights: Tensor,
        compute: Callable[..., Tensor],
        meanwhile: Callable[[], None],
    ) -> Tensor:
        """Return what experts make of tokens (n, D), sent to ``kept`` (n, K) with these weights.

        ``compute``: ``_compute``, given a number of a virtual shard.
        """

        def of_shard(shard: int, x: Tensor, kept: Tensor, weights: Tensor) -> Tensor:
            return mix_experts(
                x, kept, weights, self.spec.router.experts, self.ep, partial(compute, shard=shard),
                way=self.way, chunks=self.chunks, by_source=self.by_source,
                meanwhile=None if shard else meanwhile,
            )  # fmt: skip

        if (shards := self.token_shards) is None:
            return of_shard(0, x, kept, weights)
        parts = shards.split(x), shards.split(kept, -1), shards.split(weights)
        return shards.each(of_shard, *parts, tokens=len(x))

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

    def _count(self, experts: Tensor, kept: Tensor) -> None:
        """Count choices (n, K) before and after a capacity; with virtual shards of own tokens."""
        if (shards := self.token_shards) is not None:
            experts, kept = (torch.cat(shards.split(each, -1)) for each in (experts, kept))
        self.router.count(experts, kept)

    def _compute(
        self,
        rows: Tensor,
        counts: Tensor,
        *,
        selective: bool,
        shard: int,
        chunk: tuple[int, int],
    ) -> Tensor:
        """Rows (R, D), grouped by expert, through their experts -> (R, D).

        They are of a virtual shard, by number, of a chunk, whose number is first of so many.
        """
        own = 1 if self.token_shards is None else self.token_shards.own
        number, chunks = chunk
        of_part = {"part": number * own + shard, "parts": chunks * own}
        activate = partial(activated, self.spec, alternating=self.spec.transposed)
        if self.by_source:
            activate = partial(each_group, activate, counts=counts)
        y = self.first(rows, counts, **of_part)
        if not selective:
            return self.down(activate(y), counts, **of_part)
        return between(activate, y, partial(self.down, counts=counts, **of_part))

    def _shared(self, x: Tensor, context: Context) -> list[Tensor]:
        """Return the shared expert's result (T, D), if there is one, in a list."""
        if self.shared is None:
            return []
        run = self.run_shared
        y = self.shared(x, context) if run is None else run(self.shared, x, context)
        return [y if self.shared_gate is None else y * self.shared_gate(x)]


def _extend(found: list[Tensor], make: Callable[..., list[Tensor]], *inputs: object) -> None:
    found.extend(make(*inputs))
