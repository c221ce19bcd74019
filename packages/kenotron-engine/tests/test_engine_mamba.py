"""A small Mamba as Kénotron's example has it, and a Mamba-2: trained on dp x pp x tp as on one."""

from __future__ import annotations

from functools import cache
from typing import Any

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
from kenotron_models.families import Mamba2ModelConfig, MambaModelConfig
from kenotron_tp import TPMode

STEPS = 5
SMALL = {
    "mamba": MambaModelConfig(d_model=32, num_hidden_layers=4, vocab_size=277),
    "mamba2": Mamba2ModelConfig(
        hidden_size=32, num_hidden_layers=4, vocab_size=277, num_heads=8, head_dim=8, n_groups=1,
        state_size=8, chunk_size=4,
    ),
}  # fmt: skip
DRAWS = (0.02, "FAN_IN", 1)


def trained(
    mesh: Mesh, name: str, dtype: torch.dtype = torch.float32, sequence_parallel: bool = False
) -> tuple[list[float], list[Piece]]:
    """Losses and norms of some steps, and the weights after them."""
    plan = ModelPlan(
        spec=SMALL[name].decoder,
        draws=DRAWS,
        dtype=dtype,
        mode=TPMode(sequence_parallel=sequence_parallel),
    )
    training = build_training(plan, ADAMW, mesh, train_steps=STEPS)
    numbers: list[float] = []
    (batch,) = batches_of(mesh, 1, SMALL[name].vocab_size)
    for step in range(1, STEPS + 1):
        result = training_step(training, batch, step)
        numbers += [result.loss, result.grad_norm]
    return numbers, weight_pieces(training)


@cache
def on_one(name: str, dtype: torch.dtype) -> Any:
    return on_ranks(trained, name, dtype)[0]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("axes", [{"dp": 2, "pp": 2, "tp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_it_trains_on_every_layout_as_on_one_process(
    axes: dict[str, int], sequence_parallel: bool, name: str
) -> None:
    numbers, pieces = on_one(name, torch.float32)
    assert numbers[-2] < numbers[0]
    ranks = on_ranks(trained, name, torch.float32, sequence_parallel, **axes)
    for found, _ in ranks:
        assert found == pytest.approx(numbers, rel=1e-5)
    ours, theirs = join_pieces(each[1] for each in ranks), join_pieces([pieces])
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[name] - theirs[name]).max() <= 3e-4 for name in theirs)


@pytest.mark.parametrize("name", SMALL)
def test_in_bf16_the_stream_and_the_constants_are_fp32(name: str) -> None:
    """Stages hand on the fp32 stream; losses are those of one process to bf16's rounding."""
    numbers, _ = on_one(name, torch.bfloat16)
    wide, _ = on_one(name, torch.float32)
    assert numbers == pytest.approx(wide, rel=2e-2)
    for found, _ in on_ranks(trained, name, torch.bfloat16, dp=2, pp=2, tp=2):
        assert found[::2] == pytest.approx(numbers[::2], rel=2e-3)
        assert found[1::2] == pytest.approx(numbers[1::2], rel=3e-2)  # norms of gradients
