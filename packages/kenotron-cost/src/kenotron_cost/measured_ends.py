"""Memory and messages of the embedding and of the output layer with its loss."""

from __future__ import annotations

import torch

from kenotron_cost.cost_plan import CostPlan
from kenotron_cost.logits import logit_sizes, logits_bytes
from kenotron_cost.stage_tensors import PlannedStage, StageTensors
from kenotron_models import TransformersSpec
from kenotron_models.block_costs import (
    Messages,
    MetaMicroBatch,
    end_messages,
    head_bytes,
    norm_bytes,
)


class MeasuredEnds(StageTensors):
    """The ends of a model, measured when they are first asked for."""

    def ends(self, plan: CostPlan) -> dict[str, int]:
        """Return the bytes that the last norm and the output layer have in use."""
        sizes, tokens = plan.parallelism, plan.micro_batch_size * plan.row_tokens
        key = "ends", sizes.tp, sizes.tp_mode, tokens, plan.dtype
        return self.once(key, lambda: self._ends(plan, tokens))

    def _ends(self, plan: CostPlan, tokens: int) -> dict[str, int]:
        """Return those of a number of tokens."""
        sizes = plan.parallelism
        hidden = tokens * plan.spec.hidden_size * plan.dtype.itemsize
        norm = dict(self._layers(plan)).get("norm")
        kept = 0
        if norm is not None and not isinstance(plan.spec, TransformersSpec):
            own = tokens // sizes.tp if sizes.mode.sequence_parallel else tokens
            dtype = torch.float32 if plan.spec.residual_in_fp32 else plan.dtype
            width, fused = plan.spec.hidden_size, plan.on_accelerator
            kept = norm_bytes(norm, own, width, dtype, fused=fused)
        gradient, own = logit_sizes(plan)[2], 2 * hidden
        if isinstance(plan.spec, TransformersSpec):
            batch = MetaMicroBatch(
                plan.micro_batch_size, plan.row_tokens, mode=sizes.mode, dtype=plan.dtype,
                tp=sizes.tp, fused_norms=plan.on_accelerator,
            )  # fmt: skip
            kept = head_bytes(plan.spec, batch)
            own = 0 if kept else own
        found = {"output layer": kept + own, "logits": logits_bytes(plan)}
        return found | {"gradient of the output layer": gradient}

    def ends_sent(
        self, plan: CostPlan, stage: PlannedStage
    ) -> dict[str, tuple[Messages, Messages]]:
        """Return what ``embedding`` and ``head`` of a rank send over tp for a micro-batch.

        Forward and backward, further predictions included; nothing is known of those of
        transformers.
        """
        names = [name for name in ("embedding", "head") if name in stage.names]
        sizes = plan.parallelism
        if sizes.tp == 1 or not names or isinstance(plan.spec, TransformersSpec):
            return {}
        batch = MetaMicroBatch(
            rows=plan.micro_batch_size,
            sequence=plan.row_tokens,
            mode=sizes.mode,
            dtype=plan.dtype,
            residual=torch.float32 if plan.spec.residual_in_fp32 else None,
            recompute="none",
            tp=sizes.tp,
        )
        key = "ends sent", sizes.tp, sizes.tp_mode, batch.rows, batch.sequence, plan.dtype
        found = self.once(key, lambda: end_messages(plan.spec, batch, plan.vocab_divisible_by))
        uses = 1 + len(plan.spec.mtp_blocks)
        return {
            name: (forward.times(uses), backward.times(uses))
            for name, (forward, backward) in found.items()
            if name in names
        }
