"""Memory, kernels and transfers of a model's blocks on any layout; nothing is allocated.

Each kind of block is measured once for each way of cutting it, on torch's meta device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from kenotron_engine import way_of
from kenotron_models import (
    KernelWork,
    Recompute,
    TransformersBlock,
    block_kernels,
    kept_bytes,
    sent_bytes,
    sequence_bytes,
)
from kenotron_tp import tokens_at_a_time
from kenotron_train.cost.cost_plan import CostPlan, measured_blocks
from kenotron_train.cost.stage_tensors import StageTensors


class MeasuredModel(StageTensors):
    """A model whose parts are measured when they are first asked for.

    Args:
        plan: any plan of the model; layouts of others may differ.
        exact: measure all rows of a micro-batch at once. Otherwise it is one row, whose figures are
            multiplied: those of experts are rounded up for each of them, up to 5 % too many.
    """

    def __init__(self, plan: CostPlan, *, exact: bool = False) -> None:
        super().__init__()
        blocks = [(each, plan.adapter_of(n)) for n, each in enumerate(measured_blocks(plan.spec))]
        kinds = {block: number for number, block in enumerate(dict.fromkeys(blocks))}
        self.kinds = [kinds[block] for block in blocks]
        """Number of the kind of each block."""
        self.first = {kind: self.kinds.index(kind) for kind in kinds.values()}
        """A block of each kind."""
        self.exact = exact

    def kept(self, plan: CostPlan, kind: int, again: Recompute) -> int:
        """Return the bytes that a rank keeps of a micro-batch for the backward of a block."""
        sizes, rows = plan.parallelism, self._rows(plan)
        key = "kept", kind, sizes.tp, sizes.tp_mode, plan.row_tokens, again, rows, plan.dtype

        def measure() -> int:
            given = self._block(plan, kind, again) | {"rows": rows}
            return kept_bytes(**given, fused_norms=plan.on_accelerator)

        return self.once(key, measure) * (plan.micro_batch_size // rows)

    def kernels(self, plan: CostPlan, kind: int, again: Recompute) -> tuple[KernelWork, KernelWork]:
        """Return the kernels of a micro-batch of a block, forward and backward."""
        sizes = plan.parallelism
        key = "kernels", kind, sizes.tp, sizes.tp_mode, sizes.ep, again, plan.dtype

        def measure() -> tuple[KernelWork, KernelWork]:
            given = self._block(plan, kind, again)
            given |= {"rows": 1, "sequence": plan.sequence, "ep": sizes.ep}
            return block_kernels(**given, fused_norms=plan.on_accelerator)

        share = plan.micro_batch_size * plan.row_tokens / plan.sequence
        forward, backward = self.once(key, measure)
        return forward.times(share), backward.times(share)

    def sent(self, plan: CostPlan, kind: int, again: Recompute) -> dict[str, int]:
        """Return the bytes that a rank sends for a micro-batch of a block over tp, ep and cp."""
        sizes, rows = plan.parallelism, self._rows(plan)
        if sizes.tp * sizes.ep * sizes.cp == 1:
            return {}
        sequence = plan.row_tokens if self.exact else plan.sequence
        given = self._block(plan, kind, again) | {"rows": rows, "sequence": sequence}
        key = kind, sizes.tp, sizes.tp_mode, again, rows, sequence, plan.dtype
        found = self.once(("sent", sizes.ep, *key), lambda: sent_bytes(**given, ep=sizes.ep))
        many = plan.micro_batch_size // rows
        share = many * plan.row_tokens / sequence
        found = {axis: int(sent * share) for axis, sent in found.items()}
        if sizes.cp > 1 and not isinstance(given["block"], TransformersBlock):
            cut = plan.cp_mode.cut(plan.sequence, sizes.cp)
            way = way_of(plan.cp_mode, plan.spec, sizes.grid)
            found["cp"] = many * self.once(
                ("over cp", sizes.cp, *key),
                lambda: sequence_bytes(given["block"], rows, cut, way, sizes.tp, plan.dtype, again),
            )
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
        kept = sum(self.kept(plan, *way) * n for way, n in self.ways(stage.blocks, again).items())
        found["activations"] = int(live / max(1, schedule.chunks) * kept)
        if not self.kinds:
            del found["activations"]  # of a model of transformers in one piece
        if {"head", "model"} & {*stage.names}:
            found["logits"] = logits_bytes(plan)
        return found

    def sent_by_stage(
        self, plan: CostPlan, rank: int, again: Sequence[Recompute]
    ) -> dict[str, int]:
        """Return the bytes that a rank of pp sends in a step by axis."""
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

    def _rows(self, plan: CostPlan) -> int:
        """Return the rows that are measured at once."""
        return plan.micro_batch_size if self.exact else 1

    def _block(self, plan: CostPlan, kind: int, again: Recompute) -> dict[str, Any]:
        """Return the arguments of what measures a block, with all rows of a micro-batch."""
        number = self.first[kind]
        return {
            "block": measured_blocks(plan.spec)[number],
            "width": plan.spec.hidden_size,
            "rows": plan.micro_batch_size,
            "sequence": plan.row_tokens,
            "tp": plan.parallelism.tp,
            "mode": plan.parallelism.mode,
            "dtype": plan.dtype,
            "residual": torch.float32 if plan.spec.residual_in_fp32 else None,
            "recompute": again,
            "adapter": plan.adapter_of(number),
        }


def logits_bytes(plan: CostPlan) -> int:
    """Return the bytes of the logits that exist at a time, and on accelerators of their softmax."""
    tokens = plan.micro_batch_size * plan.row_tokens
    width = plan.spec.vocab_size // plan.parallelism.tp
    place, nbytes = "cpu", 4
    if plan.on_accelerator:
        place, nbytes = "cuda", 4 + plan.dtype.itemsize
    return nbytes * width * min(tokens, tokens_at_a_time(tokens, width, place))
