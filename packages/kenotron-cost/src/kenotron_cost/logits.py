"""Bytes of the logits that exist at a time, of their softmax, and of what the backward adds."""

from __future__ import annotations

import torch

from kenotron_cost.cost_plan import CostPlan
from kenotron_models import TransformersSpec
from kenotron_tp import tokens_at_a_time

FLOATS_ON_CPU = 2**20
"""Logits of which a CPU has fp32 copies at a time."""
FLOATS_ELSEWHERE = 2**27
"""The same of an accelerator, where all logits are made at once."""


def logits_bytes(plan: CostPlan) -> int:
    """Return the bytes of the logits that exist at a time, and of their softmax in fp32."""
    return sum(logit_sizes(plan)[:2])


def logit_sizes(plan: CostPlan) -> tuple[int, int, int]:
    """Return the bytes of logits, of their softmax, and of the gradient of their matrix beyond it.

    Where all logits are computed at once, the softmax is freed before the gradient is made. Models
    of transformers hand all of them to the loss, which makes as many gradients, a block at a time.
    """
    tokens = plan.micro_batch_size * plan.row_tokens
    width = plan.spec.vocab_size // plan.parallelism.tp
    if isinstance(plan.spec, TransformersSpec):
        every, weight = width * tokens, width * plan.spec.hidden_size * (plan.adapter is None)
        block = FLOATS_ELSEWHERE if plan.on_accelerator else FLOATS_ON_CPU
        wide = 0 if plan.dtype == torch.float32 else 4 * min(every, 2 * block)
        made = plan.dtype.itemsize * every
        return made, made + wide, max(0, weight * plan.dtype.itemsize - made - wide)
    place = "cuda" if plan.on_accelerator else "cpu"
    at_once = min(tokens, tokens_at_a_time(tokens, width, place))
    logits, weight = width * at_once, width * plan.spec.hidden_size * (plan.adapter is None)
    wide = 4 * (logits if plan.on_accelerator else min(logits, max(width, FLOATS_ON_CPU)))
    whole = at_once == tokens
    gradient = max(0, weight * plan.dtype.itemsize - wide) if whole else 4 * weight
    return plan.dtype.itemsize * logits, wide, gradient
