"""The reproducible mode on every family: all layouts have the bits of one process."""

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
from kenotron_models import AnyConfig, TransformersSpec, virtual_shards
from kenotron_pp import schedule_named
from kenotron_tp import TPMode

STEPS, SEQUENCE, GLOBAL_BATCH, MOST = 2, 8, 6, 8
FAMILIES = {
    name: config
    for name, config in configs().items()
    if not isinstance(config.decoder, TransformersSpec)
}
IN_CHUNKS = {
    "gpt-oss": torch.float32,
    "deepseek-v3": torch.bfloat16,
    "olmoe": torch.float32,
    "jamba": torch.float32,
    "qwen3-next": torch.bfloat16,
}
"""Families whose layers are more than dense attention and feed-forward. Pieces of a row of their
states are shorter than the convolution."""
Run = tuple[list[tuple[float, float]], list[Piece], list[Piece]]


def train(
    mesh: Mesh,
    config: AnyConfig,
    dtype: torch.dtype,
    zero: int,
    sequence: bool,
    reproducible: bool = True,
    chunks: int = 1,
) -> Run:
    """Losses and norms, gradients of the last step, weights and the optimizer's state."""
    shards = virtual_shards(config.decoder, MOST) if reproducible else 1
    rule = replace(OPTIMIZER.optimizer_factory, torch_adam_is_fused=False)
    optim = replace(OPTIMIZER, optimizer_factory=rule, zero_stage=zero, weight_average=None)
    schedule = schedule_named("zb-h1" if mesh["pp"].size > 1 else "1f1b")
    plan = ModelPlan(
        spec=config.decoder, schedule=schedule, dtype=dtype, draws=(0.1, "NUM_LAYERS"),
        reproducible=reproducible, virtual_shards=shards, virtual_chunks=chunks,
        mode=TPMode(sequence_parallel=sequence),
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


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_family_has_the_bits_of_one_process(name: str, dtype: torch.dtype) -> None:
    config = FAMILIES[name]
    [alone] = on_ranks(train, config, dtype, 0, False)
    tp = min(virtual_shards(config.decoder, MOST), 4)
    layouts = [(3, {"dp": 3}), (1, {"pp": 2, "dp": 2}), (0, {"tp": tp})]
    if config.decoder.routes and dtype == torch.float32:
        layouts += [(2, {"dp": 2, "ep": 2}), (1, {"tp": 2, "ep": 2})]
    elif config.decoder.routes:
        layouts += [(2, {"dp": 2, "tp": 2, "ep": 2}), (0, {"pp": 2, "tp": 2})]
    for zero, sizes in layouts:
        ranks = on_ranks(train, config, dtype, zero, dtype == torch.float32, **sizes)
        check_bits(ranks, alone)


def check_bits(ranks: list[Run], alone: Run) -> None:
    """Compare what all ranks found with one process."""
    assert all(series == alone[0] for series, *_ in ranks)
    for part in (1, 2):
        want, got = join_pieces([alone[part]]), join_pieces(rank[part] for rank in ranks)
        assert want.keys() == got.keys()
        assert [n for n in want if not (want[n] == got[n]).all()] == []


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", IN_CHUNKS)
def test_chunks_of_samples_have_the_bits_of_one_process(name: str) -> None:
    config = FAMILIES[name], IN_CHUNKS[name]
    [alone] = on_ranks(train, *config, 0, False, True, 4)
    ep = 2 if FAMILIES[name].decoder.routes else 1
    for zero, sizes in ((2, {"cp": 2, "ep": ep}), (1, {"cp": 2, "tp": 2, "ep": ep})):
        check_bits(on_ranks(train, *config, zero, True, True, 4, **sizes), alone)


@pytest.mark.parametrize("name", ["qwen2-moe", "deepseek-v3", "olmo2", "jamba", "granite-hybrid"])
def test_the_numbers_of_a_family_are_those_of_the_usual_mode(name: str) -> None:
    config = FAMILIES[name], torch.float32, 0, False
    [(exact, *_)], [(usual, *_)] = on_ranks(train, *config), on_ranks(train, *config, False)
    assert exact[0] == pytest.approx(usual[0], rel=2e-6)
    assert exact[1] == pytest.approx(usual[1], rel=1e-3)  # after an update, whose signs decide


def test_families_are_many() -> None:
    assert len(FAMILIES) >= 20
    assert all(virtual_shards(each.decoder, MOST) >= 4 for each in FAMILIES.values())
