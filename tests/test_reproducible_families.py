"""The reproducible mode on every family: dense ones have the bits of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_shards_of_families import OPTIMIZER, VOCABULARY, configs

from kenotron_data import Loader, RandomTokens
from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    ModelPlan,
    Piece,
    build_training,
    join_pieces,
    pieces_of,
    slice_pieces,
    training_step,
    weight_pieces,
)
from kenotron_models import AnyConfig, TransformersSpec
from kenotron_pp import schedule_named

STEPS, SEQUENCE, GLOBAL_BATCH = 2, 8, 6
FAMILIES = {
    name: config
    for name, config in configs().items()
    if not (isinstance(config.decoder, TransformersSpec) or config.decoder.routes)
}
Run = tuple[list[tuple[float, float]], list[Piece], list[Piece]]


def train(mesh: Mesh, config: AnyConfig, dtype: torch.dtype, zero: int) -> Run:
    """Losses and norms, gradients of the last step, weights and the optimizer's state."""
    rule = replace(OPTIMIZER.optimizer_factory, torch_adam_is_fused=False)
    optim = replace(OPTIMIZER, optimizer_factory=rule, zero_stage=zero, weight_average=None)
    schedule = schedule_named("zb-h1" if mesh["pp"].size > 1 else "1f1b")
    plan = ModelPlan(
        spec=config.decoder, schedule=schedule, dtype=dtype, draws=(0.1, "NUM_LAYERS"),
        reproducible=True,
    )  # fmt: skip
    training = build_training(plan, optim, mesh, train_steps=STEPS)
    data, series, gradients = mesh["dp"], [], list[Piece]()
    with Loader(
        RandomTokens(VOCABULARY, SEQUENCE, seed=3, samples=64), seed=5, dp_size=data.size,
        microbatches=GLOBAL_BATCH // data.size, micro_batch_size=1, dp_rank=data.rank,
    ) as loader:  # fmt: skip
        for step in range(1, STEPS + 1):
            gradients.clear()
            keep = lambda slices: gradients.extend(slice_pieces(training, slices))  # noqa: E731
            result = training_step(training, next(loader), step, look=keep)
            series.append((result.loss, result.grad_norm))
    state = pieces_of(training.optimizer.state(), mesh)
    return series, gradients, weight_pieces(training) + state


@pytest.mark.by_turns(5)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_dense_family_has_the_bits_of_one_process(name: str, dtype: torch.dtype) -> None:
    [alone] = on_ranks(train, FAMILIES[name], dtype, 0)
    for zero, sizes in ((3, {"dp": 3}), (1, {"pp": 2, "dp": 2})):
        ranks = on_ranks(train, FAMILIES[name], dtype, zero, **sizes)
        assert all(series == alone[0] for series, *_ in ranks)
        for part in (1, 2):
            want, got = join_pieces([alone[part]]), join_pieces(rank[part] for rank in ranks)
            assert want.keys() == got.keys()
            assert [n for n in want if not (want[n] == got[n]).all()] == []


def test_dense_families_are_many() -> None:
    assert len(FAMILIES) >= 10
