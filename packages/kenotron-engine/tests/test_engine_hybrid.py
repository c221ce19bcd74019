"""A hybrid with state spaces, attention, feed-forwards and experts, trained as on one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
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
from kenotron_models import NemotronHConfig
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


def trained(
    mesh: Mesh, sequence_parallel: bool = False, schedule: str = "1f1b"
) -> tuple[list[float], list[Piece]]:
    """Losses and norms of some steps, and the weights after them."""
    plan = ModelPlan(
        spec=HYBRID.decoder,
        draws=(0.1, "NUM_LAYERS"),
        mode=TPMode(sequence_parallel=sequence_parallel),
        schedule=SCHEDULES[schedule],
        recompute="selective" if sequence_parallel else "none",
    )
    training = build_training(plan, ADAMW, mesh, train_steps=STEPS)
    numbers: list[float] = []
    (batch,) = batches_of(mesh, 1, HYBRID.vocab_size)
    for step in range(1, STEPS + 1):
        result = training_step(training, batch, step)
        numbers += [result.loss, result.grad_norm]
    return numbers, weight_pieces(training)


@cache
def on_one() -> Any:
    return on_ranks(trained)[0]


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
def test_it_trains_on_every_layout_as_on_one_process(
    axes: dict[str, int], schedule: str, sequence_parallel: bool
) -> None:
    numbers, pieces = on_one()
    assert numbers[-2] < numbers[0]
    ranks = on_ranks(trained, sequence_parallel, schedule, **axes)
    for found, _ in ranks:
        assert found == pytest.approx(numbers, rel=1e-5)
    ours, theirs = join_pieces(each[1] for each in ranks), join_pieces([pieces])
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[name] - theirs[name]).max() <= CHANCE for name in theirs)
