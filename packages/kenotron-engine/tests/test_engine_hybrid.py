"""Hybrids of state spaces or delta rules, attention and experts, trained as on one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import ADAMW, batches_of

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    ModelPlan,
    Piece,
    build_training,
    join_pieces,
    training_step,
    weight_pieces,
)
from kenotron_models.families import NemotronHConfig, Qwen3NextConfig
from kenotron_pp import SCHEDULES
from kenotron_tp import TPMode

STEPS = 4
CHANCE = 0.02 * STEPS * 1e-2
"""A weight may deviate by this share of all the way that the learning rates let it go: of experts
with the square of relu some gradients are nearly nothing, and Adam divides by their size."""
HYBRID = NemotronHConfig(
    layers="ME*-ME*M", hidden_size=32, vocab_size=277, num_attention_heads=8,
    num_key_value_heads=2, head_dim=8, intermediate_size=48, mamba_num_heads=8, mamba_head_dim=8,
    ssm_state_size=8, n_groups=2, chunk_size=4, n_routed_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=16, moe_shared_expert_intermediate_size=24, n_group=2, topk_group=1,
    router_aux_loss_coef=0.01, router_bias_rate=0.01, use_doc_masking=True,
)  # fmt: skip
NEXT = Qwen3NextConfig(
    hidden_size=32, vocab_size=277, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, linear_num_key_heads=4, linear_num_value_heads=8,
    linear_key_head_dim=6, linear_value_head_dim=8, num_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=16, shared_expert_intermediate_size=24, router_aux_loss_coef=0.01,
    intermediate_size=48, mlp_only_layers=(1,), layers="LL*L", use_doc_masking=True,
)  # fmt: skip
MODELS = {
    "nemotron-h": (HYBRID, torch.float32, 1e-5, CHANCE),
    "qwen3-next": (NEXT, torch.float64, 2e-7, 1e-12),
}
"""Config, number format, and how far numbers (relative; losses are added up in fp32) and weights
may be from one process's. Adam turns what rounding leaves of a query of length 1 into whole steps:
after four of them fp32 is 1e-2 from fp64 on one process, too."""


def trained(
    mesh: Mesh, model: str = "nemotron-h", sequence_parallel: bool = False, schedule: str = "1f1b"
) -> tuple[list[float], list[Piece]]:
    """Losses and norms of some steps, and the weights after them."""
    spec, dtype, *_ = MODELS[model]
    optim = replace(ADAMW, accumulate_grad_in_fp32=dtype == torch.float32)
    plan = ModelPlan(
        spec=spec.decoder,
        dtype=dtype,
        draws=(0.1, "NUM_LAYERS"),
        mode=TPMode(sequence_parallel=sequence_parallel),
        schedule=SCHEDULES[schedule],
        recompute="selective" if sequence_parallel else "none",
    )
    training = build_training(plan, optim, mesh, train_steps=STEPS)
    numbers: list[float] = []
    (batch,) = batches_of(mesh, 1, 277)
    for step in range(1, STEPS + 1):
        result = training_step(training, batch, step)
        numbers += [result.loss, result.grad_norm]
    return numbers, weight_pieces(training)


@cache
def on_one(model: str) -> Any:
    return on_ranks(trained, model)[0]


@pytest.mark.parametrize(
    ("axes", "schedule"),
    [
        ({"dp": 2, "pp": 2, "tp": 2, "ep": 2}, "1f1b"),
        ({"pp": 2, "tp": 2, "ep": 2}, "zb-v"),
        ({"cp": 2, "tp": 2, "ep": 4}, "1f1b"),
    ],
    ids=str,
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_it_trains_on_every_layout_as_on_one_process(
    model: str, axes: dict[str, int], schedule: str, sequence_parallel: bool
) -> None:
    as_on_one_process(model, sequence_parallel, schedule, **axes)


def as_on_one_process(model: str, *how: Any, **axes: int) -> None:
    """Losses, norms and weights of a training on this layout are those of one process."""
    (numbers, pieces), (*_, share, most) = on_one(model), MODELS[model]
    assert numbers[-2] < numbers[0]
    ranks = on_ranks(trained, model, *how, **axes)
    for found, _ in ranks:
        assert found == pytest.approx(numbers, rel=share)
    ours, theirs = join_pieces(each[1] for each in ranks), join_pieces([pieces])
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():  # pieces are in fp32: a step of its largest element, too
        assert abs(ours[name] - x).max() <= max(most, np.spacing(abs(x).max())), name
