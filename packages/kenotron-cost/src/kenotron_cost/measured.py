"""Memory, kernels and transfers of a model's blocks on any layout; nothing is allocated.

Each kind of block is measured once for each way of cutting it, on torch's meta device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kenotron_cost.cost_plan import CostPlan
from kenotron_cost.exchanged import exchanged
from kenotron_cost.logits import logits_bytes
from kenotron_cost.measured_ends import MeasuredEnds
from kenotron_cost.stage_tensors import PlannedStage, T, layer_name
from kenotron_models import Recompute
from kenotron_models.block_costs import (
    KernelWork,
    MetaMicroBatch,
    TransformersBlock,
    Working,
    block_kernels,
    kept_bytes,
    kept_sizes,
    sent_bytes,
    sequence_bytes,
    working_bytes,
)
from kenotron_models.layers import BlockSpec, ExpertsSpec

AnyBlock = BlockSpec | TransformersBlock


class MeasuredModel(MeasuredEnds):
    """A model whose parts are measured when they are first asked for.

    Args:
        plan: any plan of the model; layouts of others may differ.
        exact: measure all rows of a micro-batch at once. Otherwise it is one row, whose figures are
            multiplied: those of experts are rounded up for each of them, up to 5 % too many.
        imbalance: tokens of the fullest rank's experts, as a multiple of those of an even load.
    """

    def __init__(self, plan: CostPlan, *, exact: bool = False, imbalance: float = 1.0) -> None:
        super().__init__(plan)
        if not 1 <= imbalance < math.inf:
            raise ValueError(f"imbalance: {imbalance} was given; it must be a number from 1")
        self.exact, self.imbalance = exact, imbalance

    def kept(self, plan: CostPlan, kind: int, again: Recompute) -> int:
        """Return the bytes that a rank keeps of a micro-batch for the backward of a block."""
        rows = self._rows(plan)
        key = "kept", kind, *self._cut_of(plan, kind), again, rows

        def measure() -> int:
            given = self._kept_with(plan, kind, again)
            return self.uneven(plan, kind, lambda each: kept_bytes(each, *given))

        return self.once(key, measure) * (plan.micro_batch_size // rows)

    def kept_storages(self, plan: CostPlan, kind: int, again: Recompute) -> Counter[int]:
        """Return how many storages of how many bytes ``kept`` are with an even load."""
        times = plan.micro_batch_size // self._rows(plan)
        given = self._kept_with(plan, kind, again)
        return Counter(size * times for size in kept_sizes(self.of_kind[kind][0], *given))

    def _kept_with(self, plan: CostPlan, kind: int, again: Recompute) -> tuple[int, MetaMicroBatch]:
        """Return the width and the rows with which it is measured what a block keeps."""
        width, batch = self._batch(plan, kind, again, self._rows(plan))
        return width, exchanged(plan, batch, keeps=True)

    def working(self, plan: CostPlan, kind: int, again: Recompute) -> Working:
        """Return the bytes in use in a block, what it keeps included."""

        def measure(rows: int, *, cut: bool) -> Working:
            width, batch = self._batch(plan, kind, again, rows)
            given = width, exchanged(plan, batch) if cut else batch

            def figure(which: int) -> int:
                return self.uneven(plan, kind, lambda each: working_bytes(each, *given)[which])

            key = "working", kind, *self._cut_of(plan, kind), again, rows, cut
            return self.once(key, lambda: Working(*map(figure, range(3))))

        over = plan.parallelism.cp > 1
        if (rows := plan.micro_batch_size) == 1 or self.exact:
            return measure(rows, cut=over)
        # Gradients of weights are as large for all rows, what is exchanged over cp for each.
        one, two = measure(1, cut=False), measure(2, cut=False)
        more = zip(one, two, measure(1, cut=over), strict=True)
        return Working(*(a + (rows - 1) * (b - a) + rows * (c - a) for a, b, c in more))

    def kernels(self, plan: CostPlan, kind: int, again: Recompute) -> tuple[KernelWork, KernelWork]:
        """Return the kernels of a micro-batch of a block, forward and backward."""
        share = plan.micro_batch_size * plan.row_tokens / plan.sequence
        forward, backward = self._kernels(plan, kind, again)
        return forward.times(share), backward.times(share)

    def _kernels(
        self, plan: CostPlan, kind: int, again: Recompute
    ) -> tuple[KernelWork, KernelWork]:
        """Return those of a whole row."""
        sizes = plan.parallelism

        def measure() -> tuple[KernelWork, KernelWork]:
            width, batch = self._batch(plan, kind, again, 1)
            given = width, replace(batch, sequence=plan.sequence)
            found = block_kernels(self.of_kind[kind][0], *given)
            forward, backward = (
                self.uneven(plan, kind, lambda x, way=way: block_kernels(x, *given)[way].nbytes)
                for way in range(2)
            )
            return replace(found[0], nbytes=forward), replace(found[1], nbytes=backward)

        key = "kernels", kind, sizes.tp, sizes.tp_mode, self._ep(plan, kind), again, plan.dtype
        return self.once(key, measure)

    def sent(self, plan: CostPlan, kind: int, again: Recompute) -> dict[str, int]:
        """Return the bytes that a rank sends for a micro-batch of a block over tp, ep and cp."""
        sizes = plan.parallelism
        if sizes.tp * sizes.ep * sizes.cp == 1:
            return {}
        block = self.of_kind[kind][0]
        if self.exact:
            given = self._batch(plan, kind, again, plan.micro_batch_size)
            found = sent_bytes(block, *given)
        else:
            share = plan.micro_batch_size * plan.row_tokens / plan.sequence
            row = Counter[str]()
            for each in self._kernels(plan, kind, again):
                row.update(each.sent)
            found = {axis: int(sent * share) for axis, sent in row.items()}
        if sizes.cp > 1 and not isinstance(block, TransformersBlock):
            cut = plan.cp_mode.cut(plan.sequence, sizes.cp)
            way = plan.cp_way
            rows = self._rows(plan)
            key = "over cp", kind, sizes.cp, sizes.tp, again, rows, plan.dtype
            batch = self._batch(plan, kind, again, rows)[1]
            one = self.once(key, lambda: sequence_bytes(block, batch, cut, way))
            found["cp"] = plan.micro_batch_size // rows * one
        return found

    def held(self, plan: CostPlan, rank: int, again: Sequence[Recompute]) -> dict[str, int]:
        """Return the bytes of a rank of pp by what they are for.

        Args:
            plan: the layout.
            rank: of pp.
            again: what each block of the model computes again.
        """
        stage, found = self.stages(plan)[rank], self.states(plan, rank)
        schedule = plan.parallelism.schedule
        live = self.live(schedule, plan.parallelism.pp, plan.microbatches)[rank]
        kept = self.of_stage("kept", plan, rank, again, self._kept_of_stage)
        found["activations"] = int(live / max(1, schedule.chunks) * kept)
        if not self.kinds:
            del found["activations"]  # of a model of transformers in one piece
        if {"head", "model"} & {*stage.names}:
            found["logits"] = logits_bytes(plan)
        return found

    def of_stage(
        self,
        name: str,
        plan: CostPlan,
        rank: int,
        again: Sequence[Recompute],
        make: Callable[[CostPlan, PlannedStage, Sequence[Recompute]], T],
    ) -> T:
        """Return what the blocks of a rank of pp have of a micro-batch, made once for all layouts
        that cut blocks and micro-batches in the same way.

        Args:
            name: of the value.
            plan: the layout.
            rank: of pp.
            again: what each block of the model computes again.
            make: the value of a layout, the layers of a rank and ``again``.
        """
        stage = self.stages(plan)[rank]
        cut = *self._cut_of(plan, None), plan.micro_batch_size
        key = name, stage.kind, tuple(again[block] for block in stage.blocks), *cut
        return self.once(key, lambda: make(plan, stage, again))

    def kept_by_layers(
        self, plan: CostPlan, rank: int, again: Sequence[Recompute]
    ) -> dict[str, int]:
        """Return the bytes of ``activations`` of a rank of pp, by kind of layer."""
        schedule, found = plan.parallelism.schedule, Counter[str]()
        live = self.live(schedule, plan.parallelism.pp, plan.microbatches)[rank]
        for way, n in self.ways(self.stages(plan)[rank].blocks, again).items():
            name = layer_name(self.of_kind[way[0]][0])
            found[name] += int(live / max(1, schedule.chunks) * self.kept(plan, *way) * n)
        return dict(found)

    def _kept_of_stage(
        self, plan: CostPlan, stage: PlannedStage, again: Sequence[Recompute]
    ) -> int:
        ways = self.ways(stage.blocks, again)
        return sum(self.kept(plan, *way) * n for way, n in ways.items())

    def sent_by_stage(
        self, plan: CostPlan, rank: int, again: Sequence[Recompute]
    ) -> dict[str, int]:
        """Return the bytes that a rank of pp sends in a step by axis."""
        found = Counter[str]()
        for way, n in self.ways(self.stages(plan)[rank].blocks, again).items():
            sent = self.sent(plan, *way)
            found.update({axis: size * n * plan.microbatches for axis, size in sent.items()})
        for ways in self.ends_sent(plan, self.stages(plan)[rank]).values():
            found["tp"] += sum(each.sent for each in ways) * plan.microbatches
        found.update(self.sent_over_data(plan, rank))
        return {axis: size for axis, size in found.items() if size}

    def ways(
        self, blocks: Sequence[int], again: Sequence[Recompute]
    ) -> Counter[tuple[int, Recompute]]:
        """Count blocks by their kind and what they compute again."""
        return Counter((self.kinds[block], again[block]) for block in blocks)

    def load(self, plan: CostPlan, kind: int) -> float:
        """Return the tokens of the fullest rank's experts, as a multiple of those of an even load.

        At most all tokens of all ranks choose experts of this one; a rank that has all experts has
        an even load. Blocks of transformers are measured with one, too.
        """
        block, ep = self.of_kind[kind][0], self._ep(plan, kind)
        if isinstance(block, TransformersBlock) or not isinstance(block.feed_forward, ExpertsSpec):
            return 1.0
        router = block.feed_forward.router
        return min(self.imbalance, ep * min(router.top_k, router.experts // ep) / router.top_k)

    def uneven(self, plan: CostPlan, kind: int, measure: Callable[[AnyBlock], int]) -> int:
        """Return a size of a block on the rank whose experts have most tokens.

        It grows with their tokens as it does with the choices of a token, of which one more is
        measured.

        Args:
            plan: the layout.
            kind: of the block.
            measure: the size of a block of the kind, or of one that differs in its choices alone.
        """
        block, load = self.of_kind[kind][0], self.load(plan, kind)
        even = measure(block)
        if load == 1 or not isinstance(block, BlockSpec):
            return even
        experts = block.feed_forward
        assert isinstance(experts, ExpertsSpec)  # others have an even load
        router, choices = experts.router, experts.router.top_k
        other = choices + 1 if choices < router.experts else choices - 1
        if not other:
            return even
        more = replace(experts, router=replace(router, top_k=other))
        one = (measure(replace(block, feed_forward=more)) - even) / (other - choices)
        return int(even + (load - 1) * choices * one)

    def _rows(self, plan: CostPlan) -> int:
        """Return the rows that are measured at once.

        Of several rows ulysses keeps fewer copies than of one.
        """
        copies = plan.parallelism.cp > 1 and plan.cp_way == "ulysses"
        return plan.micro_batch_size if self.exact or copies else 1

    def _batch(
        self, plan: CostPlan, kind: int, again: Recompute, rows: int
    ) -> tuple[int, MetaMicroBatch]:
        """Return the width of a block, and the rows that it is measured with."""
        batch = MetaMicroBatch(
            rows=rows,
            sequence=plan.row_tokens,
            mode=plan.parallelism.mode,
            dtype=plan.dtype,
            residual=torch.float32 if plan.spec.residual_in_fp32 else None,
            recompute=again,
            adapter=self.of_kind[kind][1],
            tp=plan.parallelism.tp,
            ep=self._ep(plan, kind),
            fused_norms=plan.on_accelerator,
        )
        return plan.spec.hidden_size, batch

    def _ep(self, plan: CostPlan, kind: int) -> int:
        """Return the ranks over which a block is cut as experts: 1 for one without experts."""
        block = self.of_kind[kind][0]
        has = isinstance(block, TransformersBlock) or isinstance(block.feed_forward, ExpertsSpec)
        return plan.parallelism.ep if has else 1

    def _cut_of(self, plan: CostPlan, kind: int | None) -> tuple[Any, ...]:
        """Return what the sizes of a block of a kind, or of any, depend on in a layout."""
        sizes = plan.parallelism
        ep = sizes.ep if kind is None else self._ep(plan, kind)
        return sizes.tp, sizes.tp_mode, ep, plan.row_tokens, plan.dtype, sizes.cp
