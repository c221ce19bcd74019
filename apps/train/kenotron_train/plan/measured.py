"""Sizes of stages for a search: each kind of block is measured once for each way of cutting it.

They are those of ``cost.stage_sizes``, but where tokens cannot be divided evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kenotron_dist import Axis
from kenotron_dist.placement import parameter_layouts
from kenotron_engine import stages_of, way_of
from kenotron_models import (
    Build,
    KernelWork,
    LayerStack,
    Recompute,
    TransformersSpec,
    block_kernels,
    build_decoder,
    kept_bytes,
    layer_costs,
    sent_bytes,
    sequence_bytes,
)
from kenotron_optim import Held
from kenotron_pp import NamedLayers, Schedule, Stages, simulate
from kenotron_train.cost.activations import measured_block
from kenotron_train.cost.cost_plan import CostPlan, measured_blocks, mesh_sizes
from kenotron_train.cost.machine import sent_over_data, stage_tensors, state_bytes
from kenotron_train.cost.stage_sizes import logits_bytes

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

    @property
    def blocks(self) -> list[int]:
        """Numbers of all its blocks."""
        return [each for chunk in self.chunks for each in chunk]


class MeasuredModel:
    """A model whose parts are measured when they are first asked for.

    Args:
        plan: any plan of the model; layouts of others may differ.
    """

    def __init__(self, plan: CostPlan) -> None:
        blocks = measured_blocks(plan.spec)
        kinds = {block: number for number, block in enumerate(dict.fromkeys(blocks))}
        self.kinds = [kinds[block] for block in blocks]
        """Number of the kind of each block."""
        self.first = {kind: self.kinds.index(kind) for kind in kinds.values()}
        """A block of each kind."""
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what a key stands for, made when it is first asked for."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def kept(self, plan: CostPlan, kind: int, again: Recompute) -> int:
        """Return the bytes that a rank keeps of a micro-batch for the backward of a block."""
        sizes = plan.parallelism
        key = "kept", kind, sizes.tp, sizes.tp_mode, plan.row_tokens, again

        def measure() -> int:
            given = measured_block(plan, self.first[kind], again) | {"rows": 1}
            return kept_bytes(**given, fused_norms=plan.on_accelerator)

        return self.once(key, measure) * plan.micro_batch_size

    def kernels(self, plan: CostPlan, kind: int, again: Recompute) -> tuple[KernelWork, KernelWork]:
        """Return the kernels of a micro-batch of a block, forward and backward."""
        sizes = plan.parallelism
        key = "kernels", kind, sizes.tp, sizes.tp_mode, sizes.ep, again

        def measure() -> tuple[KernelWork, KernelWork]:
            given = measured_block(plan, self.first[kind], again)
            given |= {"rows": 1, "sequence": plan.sequence, "ep": sizes.ep}
            return block_kernels(**given, fused_norms=plan.on_accelerator)

        share = plan.micro_batch_size * plan.row_tokens / plan.sequence
        forward, backward = self.once(key, measure)
        return forward.times(share), backward.times(share)

    def sent(self, plan: CostPlan, kind: int, again: Recompute) -> dict[str, int]:
        """Return the bytes that a rank sends for a micro-batch of a block over tp, ep and cp."""
        sizes, rows = plan.parallelism, plan.micro_batch_size
        if sizes.tp * sizes.ep * sizes.cp == 1:
            return {}
        given = measured_block(plan, self.first[kind], again)
        given |= {"rows": 1, "sequence": plan.sequence}
        key = kind, sizes.tp, sizes.tp_mode, again
        found = self.once(("sent", sizes.ep, *key), lambda: sent_bytes(**given, ep=sizes.ep))
        share = rows * plan.row_tokens / plan.sequence
        found = {axis: int(sent * share) for axis, sent in found.items()}
        if sizes.cp > 1:
            cut = plan.cp_mode.cut(plan.sequence, sizes.cp)
            way = way_of(plan.cp_mode, plan.spec, sizes.grid)
            found["cp"] = rows * self.once(
                ("over cp", sizes.cp, *key),
                lambda: sequence_bytes(given["block"], 1, cut, way, sizes.tp, plan.dtype, again),
            )
        return found

    def stages(self, plan: CostPlan) -> list[PlannedStage]:
        """Return the layers of each rank of the pipeline."""
        sizes = plan.parallelism
        key = "stages", sizes.pp, sizes.pp_engine, sizes.pp_chunks
        return self.once(key, lambda: self._stages(plan))

    def tensors(self, plan: CostPlan) -> list[Counter[Held]]:
        """Return the tensors of the first rank of each stage, and how often each occurs."""
        sizes = plan.parallelism
        key = "tensors", sizes.pp, sizes.tp, sizes.ep, sizes.pp_engine, sizes.pp_chunks
        return self.once(key, lambda: self._tensors(plan))

    def states(self, plan: CostPlan, rank: int) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer state of a rank of pp."""
        return self._of_tensors(plan, rank, "states", lambda each: state_bytes(plan, [each]))

    def sent_over_data(self, plan: CostPlan, rank: int) -> dict[str, int]:
        """Return the bytes that a rank of pp sends in a step over dp and edp."""
        return self._of_tensors(plan, rank, "data", lambda each: sent_over_data(plan, [each]))

    def held(self, plan: CostPlan, rank: int, again: Sequence[Recompute]) -> dict[str, int]:
        """Return the bytes of a rank of pp by what they are for, as ``cost.stage_sizes``.

        Args:
            plan: the layout.
            rank: of pp.
            again: what each block of the model computes again.
        """
        stage, found = self.stages(plan)[rank], self.states(plan, rank)
        schedule = plan.parallelism.schedule
        live = self.live(schedule, plan.parallelism.pp, plan.microbatches)[rank]
        kept = sum(self.kept(plan, *way) * n for way, n in self.ways(stage.blocks, again).items())
        found["activations"] = int(live / max(1, schedule.chunks) * kept)
        if "head" in stage.names:
            found["logits"] = logits_bytes(plan)
        return found

    def sent_by_stage(
        self, plan: CostPlan, rank: int, again: Sequence[Recompute]
    ) -> dict[str, int]:
        """Return the bytes that a rank of pp sends in a step by axis, as ``cost.stage_sizes``."""
        found = Counter[str]()
        for way, n in self.ways(self.stages(plan)[rank].blocks, again).items():
            sent = self.sent(plan, *way)
            found.update({axis: size * n * plan.microbatches for axis, size in sent.items()})
        found.update(self.sent_over_data(plan, rank))
        return dict(found)

    def ways(
        self, blocks: Sequence[int], again: Sequence[Recompute]
    ) -> Counter[tuple[int, Recompute]]:
        """Count blocks by their kind and what they compute again."""
        return Counter((self.kinds[block], again[block]) for block in blocks)

    def elements(self, plan: CostPlan) -> dict[str, int]:
        """Return the number of parameters of each layer on a rank of tp and ep."""
        return self.once(
            ("elements", plan.parallelism.tp, plan.parallelism.ep),
            lambda: {
                name: sum(p.numel() for p in layer.parameters())
                for name, layer in self._layers(plan)
            },
        )

    def _of_tensors(
        self, plan: CostPlan, rank: int, what: str, count: Callable[[Held], dict[str, int]]
    ) -> dict[str, int]:
        """Add up what tensors of a rank hold or send."""
        optimizer, sizes = plan.optimizer, plan.parallelism
        data = sizes.dp, sizes.cp, sizes.tp, sizes.ep, int(optimizer.zero_stage)
        often = plan.microbatches if what == "data" else 0
        found = Counter[str]()
        for each, times in self.tensors(plan)[rank].items():
            of_one = self.once((what, each, data, often), lambda each=each: count(each))
            found.update({name: size * times for name, size in of_one.items()})
        return dict(found)

    def _layers(self, plan: CostPlan) -> NamedLayers:
        """Return all layers of the model on a rank of tp and ep, on meta."""
        sizes = plan.parallelism
        tp, ep = (Axis(n, 0, tuple(range(getattr(sizes, n)))) for n in ("tp", "ep"))
        return self.once(
            ("layers", sizes.tp, sizes.ep),
            lambda: build_decoder(
                plan.spec,
                Build(tp, sizes.mode, dtype=plan.dtype, ep=ep),
                vocab_divisible_by=plan.vocab_divisible_by,
            ),
        )

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
            found.append(PlannedStage(names, blocks))
        return found

    def live(self, schedule: Schedule, pp: int, many: int) -> list[int]:
        """Return the most parts of micro-batches that are alive at once on each rank of pp.

        Beyond some micro-batches for each stage, peaks stay or grow evenly with their number.
        """

        def peaks(n: int) -> tuple[int, ...]:
            key = "live", schedule.name, schedule.chunks, pp, n
            return self.once(key, lambda: simulate(schedule, pp, n).peak_live)

        few, more = (n * pp * schedule.chunks + many % pp for n in STEADY)
        if many <= more:
            return [*peaks(many)]
        return [
            last + (many - more) * (last - first) // (more - few)
            for first, last in zip(peaks(few), peaks(more), strict=True)
        ]

    def _tensors(self, plan: CostPlan) -> list[Counter[Held]]:
        """Describe the tensors of the first rank of every stage."""
        layers = self._layers(plan)
        sizes = mesh_sizes(plan.parallelism)
        stages = self._cut(plan, layers)
        spec = plan.spec
        tied = spec.tie_word_embeddings or spec.mtp_blocks or isinstance(spec, TransformersSpec)
        if tied:  # which depends on the ranks that own the matrix
            layouts = parameter_layouts(LayerStack(layers), sizes.axis_sizes, stages.of_parameter)
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


def _block_of(plan: CostPlan, name: str) -> list[int]:
    """Return the number of the block of a layer, if it has one; that of mtp follows the others."""
    if name.startswith("layers."):
        return [int(name.split(".")[1])]
    return [plan.spec.num_hidden_layers] if name == "mtp.0" else []
