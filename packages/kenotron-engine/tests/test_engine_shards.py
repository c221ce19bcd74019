"""ZeRO stages 2 and 3 on whole trainings: the bits of stage 1 on every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from engine_cases import ADAMW, EXPERTS, LLAMA, batches_of, plan

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    Piece,
    Training,
    build_training,
    join_pieces,
    training_step,
    weight_pieces,
)
from kenotron_models.families import Starcoder2Config
from kenotron_optim import MuonConfig
from kenotron_pp import SCHEDULES
from kenotron_tp import TPMode

STEPS = 3
STAGES: list[dict[str, Any]] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 3, "regather": "step"},
]
Run = tuple[list[float], list[Piece], list[Piece], int]


def train(mesh: Mesh, optim: dict[str, Any], model: dict[str, Any]) -> Run:
    """Losses and norms, weights before the first step and after the last; bytes kept at the end."""
    model = dict(model)
    idle = model.pop("idle experts", 0)
    if schedule := model.pop("schedule", None):
        model["schedule"] = SCHEDULES[schedule]
    made = plan(**{"draws": (0.1, "NUM_LAYERS"), **model})
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):  # no C++
        training = build_training(made, replace(ADAMW, **optim), mesh, train_steps=STEPS)
    for name, buffer in training.model.stack.named_buffers():
        if idle and name.endswith("choice_bias"):
            buffer[-idle:] = -1e9
    first, numbers = weight_pieces(training), list[float]()
    for step, batch in enumerate(batches_of(mesh, STEPS), start=1):
        result = training_step(training, batch, step)
        numbers += [result.loss, result.grad_norm]
    training.check_replicas()
    kept = bytes_of_parameters(training)
    return numbers, first, weight_pieces(training), kept


def bytes_of_parameters(training: Training) -> int:
    learning = (p for p in training.model.stack.parameters() if p.requires_grad)
    return sum(p.untyped_storage().nbytes() for p in learning)


def of_stages(mesh: Mesh, optim: dict[str, Any], model: dict[str, Any]) -> list[Run]:
    return [train(mesh, {"reduce": "step", **optim, **stage}, model) for stage in STAGES]


ALL_EXPERTS = replace(EXPERTS, moe_config=replace(EXPERTS.moe_config, layers=(0, 1)))
POSITIONS = Starcoder2Config(
    vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=9000, use_position_embeddings=True, use_rotary_embeddings=False,
)  # fmt: skip
"""Its table of positions is so large that memory which is given again has other values."""
CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "tp": ({"dp": 2, "tp": 2}, {"mode": TPMode(sequence_parallel=True)}, {}),
    "1f1b": ({"pp": 2, "dp": 2}, {"recompute": "full", "schedule": "1f1b"}, {}),
    "zb-v": ({"pp": 2, "dp": 2}, {"schedule": "zb-v"}, {}),
    "zb-v, experts": (
        {"dp": 2},
        {"schedule": "zb-v", "recompute": "selective", "spec": ALL_EXPERTS.decoder},
        {},
    ),
    "zb-h1": ({"pp": 2, "dp": 2}, {"schedule": "zb-h1", "recompute": "selective"}, {}),
    "zb-h1, experts": (
        {"pp": 2, "tp": 2, "ep": 2},
        {"schedule": "zb-h1", "recompute": "selective", "spec": EXPERTS.decoder},
        {},
    ),
    "zb-h1, experts again": (
        {"pp": 2, "tp": 2, "ep": 2},
        {"schedule": "zb-h1", "recompute": "full", "spec": EXPERTS.decoder},
        {},
    ),
    "interleaved": ({"pp": 2, "dp": 2}, {"schedule": "interleaved"}, {}),
    "cp": ({"cp": 2, "dp": 2}, {"recompute": "full"}, {}),
    "ep": ({"dp": 2, "tp": 2, "ep": 2}, {"spec": EXPERTS.decoder}, {}),
    "no tokens": (
        {"dp": 2, "tp": 2, "ep": 4},
        {"spec": EXPERTS.decoder, "idle experts": 4, "recompute": "full", "schedule": "zb-h1"},
        {},
    ),
    "bf16": ({"dp": 2, "tp": 2}, {"dtype": torch.bfloat16}, {}),
    "own sums": ({"dp": 2}, {"dtype": torch.bfloat16}, {"accumulate_grad_in_fp32": False}),
    "muon": ({"dp": 2, "pp": 2}, {}, {"optimizer_factory": MuonConfig()}),
    "muon, experts": (
        {"dp": 2, "tp": 2, "ep": 2},
        {"spec": EXPERTS.decoder},
        {"optimizer_factory": MuonConfig(per_head=True)},
    ),
    "hybrid": ({"dp": 4}, {}, {"shard_ranks": 2}),
    "hybrid, cp": ({"dp": 2, "cp": 2}, {}, {"shard_ranks": 1, "optimizer_factory": MuonConfig()}),
    "positions next to a tied matrix": ({"dp": 2}, {"spec": POSITIONS.decoder}, {}),
    "compile": ({"dp": 2}, {"compile": True, "recompute": "selective"}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.by_turns(6)
def test_stages_agree_to_the_bit_and_stage_3_keeps_no_parameter(case: str) -> None:
    axes, model, optim = CASES[case]
    ranks = on_ranks(of_stages, optim, model, **axes)
    for rank in ranks:
        numbers, *_, whole = rank[0]
        assert all(numbers == other[0] for other in rank)
        assert whole == rank[1][-1] > 0
        assert rank[2][-1] == rank[3][-1] == 0
    for before_or_after in (1, 2):
        one, *others = (
            join_pieces(rank[stage][before_or_after] for rank in ranks)
            for stage in range(len(STAGES))
        )
        for other in others:
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one)


def kept_whole(mesh: Mesh, schedule: str) -> set[str]:
    """Names of the parameters whose gradients stage 2 keeps whole."""
    made = plan(
        spec=EXPERTS.decoder,
        schedule=SCHEDULES[schedule],
        mode=TPMode(sequence_parallel=mesh["tp"].size > 1),
    )
    grads = build_training(made, replace(ADAMW, zero_stage=2), mesh, train_steps=1).grads
    return {
        span.name
        for bucket, buffer in zip(grads.buckets, grads.buffers, strict=True)
        for span in bucket.spans
        if not buffer.is_meta
    } | grads._seconds.keys()


def test_gradients_of_norms_and_of_matrices_that_stages_tie_are_whole() -> None:
    assert on_ranks(kept_whole, "1f1b", dp=2) == [set()] * 2
    assert on_ranks(kept_whole, "zb-v", dp=2, pp=2) == [set()] * 4  # both owners on the first rank
    for names in on_ranks(kept_whole, "1f1b", dp=2, pp=2):
        assert names == {"embedding.weight"}
    for names in on_ranks(kept_whole, "1f1b", dp=2, tp=2, ep=2):
        kinds = {name.split(".")[-2].rpartition("_")[2] for name in names}
        assert kinds == {"norm", "router", "gate"}  # vectors, and a row for each expert


def test_slices_of_each_micro_batch_are_within_rounding() -> None:
    one = on_ranks(train, STAGES[0], {}, dp=2)[0]
    for stage in STAGES[1:]:
        assert on_ranks(train, stage, {}, dp=2)[0][0] == pytest.approx(one[0], rel=1e-6)


DEEP = replace(LLAMA, num_hidden_layers=12, tie_word_embeddings=False)


def most_bytes(mesh: Mesh, schedule: str) -> tuple[int, int, int]:
    """Largest memory of parameters within two steps, that of the largest layer and of vectors."""
    made = plan(spec=DEEP.decoder, schedule=SCHEDULES[schedule])
    training = build_training(made, replace(ADAMW, zero_stage=3), mesh, train_steps=2)
    most, shards = [0], training.optimizer._gathers
    start = shards._start

    def watched(group: int) -> None:
        start(group)
        most.append(bytes_of_parameters(training))

    with mock.patch.object(shards, "_start", watched):
        for step, batch in enumerate(batches_of(mesh, 2), start=1):
            training_step(training, batch, step)
    sizes = (sum(p.nbytes for p in layer.parameters()) for layer in training.model.stack)
    vectors = sum(p.nbytes for p in training.model.stack.parameters() if p.ndim == 1)
    return max(most), max(sizes), vectors


@pytest.mark.parametrize(("schedule", "layers"), [("1f1b", 2), ("zb-h1", 2.5), ("zb-v", 3.5)])
def test_two_layers_of_a_part_have_parameters_at_most(schedule: str, layers: float) -> None:
    for most, layer, vectors in on_ranks(most_bytes, schedule, pp=2, dp=2):
        kept = 0 if schedule == "1f1b" else vectors  # a split backward reads them again
        assert layer < most <= layers * layer + kept
