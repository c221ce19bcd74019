"""Layers and tensors of the stages of a model on any layout, on torch's meta device.

Everything is made when it is first asked for, once for each way of cutting the model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from kenotron_cost.cost_plan import CostPlan, measured_blocks, mesh_sizes, sizes_of
from kenotron_cost.state_bytes import bucket_bytes, sent_over_data, stage_tensors, state_bytes
from kenotron_dist import Axis
from kenotron_dist.placement import TensorLayout, parameter_layouts
from kenotron_engine import stages_of
from kenotron_models import (
    Build,
    LayerStack,
    Recompute,
    TransformersSpec,
    build_decoder,
    layer_costs,
)
from kenotron_models.adapters import adapt
from kenotron_models.block_costs import TransformersBlock
from kenotron_models.layers import BlockSpec
from kenotron_optim import Held, slice_ranks
from kenotron_pp import Action, NamedLayers, Schedule, Stages, peak_live, rank_actions

T = TypeVar("T")
STEADY = 2, 3
"""Micro-batches for each stage of which the peaks say how all more of them continue."""


@dataclass(frozen=True)
class PlannedStage:
    """A rank of the pipeline."""

    names: list[str]
    """Its layers."""
    chunks: list[list[int]]
    """Numbers of the blocks of each of its parts."""
    kind: int
    """Equal for ranks with equal layers, of any pipeline."""

    @cached_property
    def blocks(self) -> list[int]:
        """Numbers of all its blocks."""
        return [each for chunk in self.chunks for each in chunk]


class StageTensors:
    """Layers and tensors of a model's stages; plans of one model differ in their layouts."""

    def __init__(self, plan: CostPlan) -> None:
        self.sizes = sizes_of(plan.spec)
        blocks = [(each, plan.adapter_of(n)) for n, each in enumerate(measured_blocks(plan.spec))]
        self.of_kind = [*dict.fromkeys(blocks)]
        """Block and adapters of each kind."""
        numbers = {block: number for number, block in enumerate(self.of_kind)}
        self.kinds = [numbers[block] for block in blocks]
        """Number of the kind of each block."""
        self._known: dict[Hashable, Any] = {}
        self._stage_kinds: dict[Hashable, int] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what a key stands for, made when it is first asked for."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def stages(self, plan: CostPlan) -> list[PlannedStage]:
        """Return the layers of each rank of the pipeline."""
        return self.once(("stages", *cut_of_stages(plan)), lambda: self._stages(plan))

    def layouts(self, plan: CostPlan) -> dict[str, TensorLayout]:
        """Return the layouts of the whole model's parameters."""
        layers = self._layers(plan)
        found = self._cut(plan, layers).of_parameter
        return parameter_layouts(LayerStack(layers), mesh_sizes(plan.parallelism).axis_sizes, found)

    def tensors(self, plan: CostPlan) -> list[Counter[Held]]:
        """Return the tensors of the first rank of each stage, and how often each occurs."""
        sizes = plan.parallelism
        key = "tensors", sizes.tp, sizes.ep, *cut_of_stages(plan)
        return self.once(key, lambda: self._tensors(plan))

    def differing(self, plan: CostPlan, again: Sequence[Recompute]) -> list[int]:
        """Return ranks of pp that stand for all others.

        Of ranks with equal layers they are the first one, and the first one of those that have most
        parts of micro-batches alive.
        """
        sizes = plan.parallelism
        cut = sizes.pp, sizes.pp_engine, sizes.pp_chunks, plan.microbatches, tuple(again)
        return self.once(("differing", *cut), lambda: self._differing(plan, again))

    def _differing(self, plan: CostPlan, again: Sequence[Recompute]) -> list[int]:
        live = self.live(plan.parallelism.schedule, plan.parallelism.pp, plan.microbatches)
        first, fullest = dict[Hashable, int](), dict[Hashable, int]()
        for rank, stage in enumerate(self.stages(plan)):
            key = stage.kind, tuple(again[block] for block in stage.blocks)
            first.setdefault(key, rank)
            if live[rank] > live[fullest.setdefault(key, rank)]:
                fullest[key] = rank
        return sorted({*first.values(), *fullest.values()})

    def states(self, plan: CostPlan, rank: int) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer state of a rank of pp."""
        return self._added(plan, rank, state_bytes, plan.microbatches if plan.leaves else 0)

    def sent_over_data(self, plan: CostPlan, rank: int) -> dict[str, int]:
        """Return the bytes that a rank of pp sends in a step over dp and edp."""
        return self._added(plan, rank, sent_over_data, plan.microbatches)

    def buckets(self, plan: CostPlan, rank: int) -> int:
        """Return the bytes of the buckets of gradients that a rank of pp fills or sends."""
        key = "buckets", self.stages(plan)[rank].kind, plan.microbatches, cut_of_data(plan)
        return self.once(key, lambda: bucket_bytes(plan, self.tensors(plan)[rank].elements()))

    def updated(self, plan: CostPlan, rank: int) -> int:
        """Return the elements of the largest slice that a rank of pp updates."""
        sizes = mesh_sizes(plan.parallelism)
        return max(
            (-(-each.count // slice_ranks(each, plan.optimizer, sizes))
             for each in self.tensors(plan)[rank] if each.learns),
            default=0,
        )  # fmt: skip

    def elements(self, plan: CostPlan) -> dict[str, int]:
        """Return the number of parameters of each layer on a rank of tp and ep."""
        return self.once(
            ("elements", plan.parallelism.tp, plan.parallelism.ep),
            lambda: {
                name: sum(p.numel() for p in layer.parameters())
                for name, layer in self._layers(plan)
            },
        )

    def live(self, schedule: Schedule, pp: int, many: int) -> list[int]:
        """Return the most parts of micro-batches that are alive at once on each rank of pp.

        Beyond some micro-batches for each stage, peaks stay or grow evenly with their number.
        """

        def peaks(n: int) -> tuple[int, ...]:
            key = "live", schedule.name, schedule.chunks, pp, n
            return self.once(key, lambda: peak_live(self.actions(schedule, pp, n)))

        few, more = (n * pp * schedule.chunks + many % pp for n in STEADY)
        if many <= more:
            return [*peaks(many)]
        return [
            last + (many - more) * (last - first) // (more - few)
            for first, last in zip(peaks(few), peaks(more), strict=True)
        ]

    def actions(self, schedule: Schedule, pp: int, many: int) -> list[list[Action]]:
        """Return the actions of every rank of pp, for few micro-batches."""
        key = "actions", schedule.name, schedule.chunks, pp, many
        return self.once(key, lambda: rank_actions(schedule, pp, many))

    def _added(
        self,
        plan: CostPlan,
        rank: int,
        count: Callable[[CostPlan, list[Held]], dict[str, int]],
        often: int,
    ) -> dict[str, int]:
        """Add up what the tensors of a rank hold or send, once for ranks with equal layers."""
        cut = count, often, *cut_of_data(plan)

        def added() -> dict[str, int]:
            found = Counter[str]()
            for each, times in self.tensors(plan)[rank].items():
                of_one = self.once((each, cut), partial(count, plan, [each]))
                found.update({name: size * times for name, size in of_one.items()})
            return dict(found)

        return self.once((self.stages(plan)[rank].kind, cut), added)

    def _layers(self, plan: CostPlan) -> NamedLayers:
        """Return all layers of the model on a rank of tp and ep, on meta."""
        sizes = plan.parallelism
        tp, ep = (Axis(n, 0, tuple(range(getattr(sizes, n)))) for n in ("tp", "ep"))
        return self.once(("layers", sizes.tp, sizes.ep, plan.dtype), lambda: _built(plan, tp, ep))

    def _cut(self, plan: CostPlan, layers: NamedLayers) -> Stages:
        """Return the cut of the layers into stages."""
        sizes = plan.parallelism
        schedule = sizes.schedule
        stages = self.once(
            ("cut", sizes.pp * schedule.chunks),
            lambda: stages_of(
                layers, layer_costs(plan.spec), plan.spec.stage_starts, sizes.pp, schedule
            ),
        )
        return replace(stages, schedule=schedule)

    def _stages(self, plan: CostPlan) -> list[PlannedStage]:
        """Name the layers of each rank."""
        layers, found = self._layers(plan), list[PlannedStage]()
        stages = self._cut(plan, layers)
        for rank in range(plan.parallelism.pp):
            chunks = [[name for name, _ in own] for own in stages.chunks(layers, rank)]
            blocks = [[n for name in own for n in _block_of(plan, name)] for own in chunks]
            names = [name for own in chunks for name in own]
            kinds = (*(tuple(self.kinds[n] for n in own) for own in blocks),)
            key = kinds, tuple(name for name in names if not name.startswith("layers."))
            kind = self._stage_kinds.setdefault(key, len(self._stage_kinds))
            found.append(PlannedStage(names, blocks, kind))
        return found

    def _tensors(self, plan: CostPlan) -> list[Counter[Held]]:
        """Describe the tensors of the first rank of every stage."""
        layers = self._layers(plan)
        sizes = mesh_sizes(plan.parallelism)
        stages = self._cut(plan, layers)
        spec = plan.spec
        tied = spec.tie_word_embeddings or spec.mtp_blocks or isinstance(spec, TransformersSpec)
        if tied:  # which depends on the ranks that own the matrix
            layouts = self.layouts(plan)
            return [
                Counter(
                    stage_tensors(
                        LayerStack(stages.own(layers, rank)), layouts, sizes, rank, plan.optimizer
                    )
                )
                for rank in range(sizes.pp)
            ]
        of_layer = self.once(
            ("layer tensors", sizes.tp, sizes.ep), lambda: self._layer_tensors(plan, layers)
        )
        names = (self.stages(plan)[rank].names for rank in range(sizes.pp))
        return [sum((of_layer[name] for name in own), Counter[Held]()) for own in names]

    def _layer_tensors(self, plan: CostPlan, layers: NamedLayers) -> dict[str, Counter[Held]]:
        """Describe the tensors of each layer."""
        sizes = mesh_sizes(replace(plan.parallelism, pp=1))
        layouts = parameter_layouts(LayerStack(layers), sizes.axis_sizes, lambda _: 0)
        return {
            name: Counter(
                stage_tensors(LayerStack([(name, layer)]), layouts, sizes, 0, plan.optimizer)
            )
            for name, layer in layers
        }


def cut_of_stages(plan: CostPlan) -> tuple[Hashable, ...]:
    """Return what the layers of the ranks of a pipeline depend on."""
    schedule = plan.parallelism.schedule
    return plan.parallelism.pp, schedule.chunks, schedule.wiring


def cut_of_data(plan: CostPlan) -> tuple[Hashable, ...]:
    """Return what the gradients and states of a tensor depend on."""
    sizes, optimizer = plan.parallelism, plan.optimizer
    return (
        sizes.dp, sizes.cp, sizes.tp, sizes.ep, int(optimizer.zero_stage), optimizer.shard_ranks,
        optimizer.offload, optimizer.accumulate_grad_in_fp32, plan.dtype,
    )  # fmt: skip


def _built(plan: CostPlan, tp: Axis, ep: Axis) -> NamedLayers:
    """Build all layers of a model, with their adapters."""
    layers = build_decoder(
        plan.spec,
        Build(tp, plan.parallelism.mode, dtype=plan.dtype, ep=ep),
        vocab_divisible_by=plan.vocab_divisible_by,
    )
    if plan.adapter is not None:
        adapt(layers, plan.adapter, tp)
    return layers


def _block_of(plan: CostPlan, name: str) -> list[int]:
    """Return the number of the block of a layer, if it has one; that of mtp follows the others."""
    if name.startswith("layers."):
        return [int(name.split(".")[1])]
    return [plan.spec.num_hidden_layers] if name == "mtp.0" else []


def layer_name(block: BlockSpec | TransformersBlock) -> str:
    """Return the kind of a block: its parts, or the first layer of a model of transformers."""
    if isinstance(block, TransformersBlock):
        return f"layers as {block.number}"
    names = (type(part).__name__.removesuffix("Spec") for part in block.parts)
    return " + ".join(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower() for name in names)
