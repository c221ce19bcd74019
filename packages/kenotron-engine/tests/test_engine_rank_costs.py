"""Memory of a rank by class, and what data ranks send: tensors and messages against arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import ADAMW, EXPERTS, LLAMA, batches_of, plan

from kenotron_dist import Mesh
from kenotron_dist.diagnosis import record
from kenotron_dist.placement import named_parameters
from kenotron_dist.testing import on_ranks
from kenotron_engine import Training, build_training, training_step
from kenotron_models.adapters import AdapterSpec, linear_parts, targeted
from kenotron_optim import (
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    data_bytes,
    held_tensors,
    state_bytes,
)

Bytes = dict[str, int]
Costs = tuple[Bytes, Bytes, Bytes, Bytes]
Case = tuple[dict[str, Any], torch.dtype, dict[str, Any]]
WIDE = {"hidden_size": 64, "intermediate_size": 160}
LLAMA_PLAN = {"spec": replace(LLAMA, **WIDE).decoder}
UNTIED_PLAN = {"spec": replace(LLAMA, **WIDE, tie_word_embeddings=False).decoder}
EXPERTS_PLAN = {"spec": replace(EXPERTS, **WIDE).decoder}
WITH_ADAPTERS, WITH_STACKS = (
    {
        "spec": family.decoder,
        "adapter": AdapterSpec(rank=2, alpha=4, weights=targeted(linear_parts(family), ["all"])),
    }
    for family in (replace(LLAMA, **WIDE), replace(EXPERTS, **WIDE))
)
BACKWARDS = 2
SENDERS = (
    "reduction", "slice_sums", "data_axes", "gradient_gather", "parameter_gather",
    "parameter_memory",
)  # fmt: skip
"""Modules that send gradients and parameters."""


def bytes_of(tensors: Iterable[torch.Tensor], but: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of storages, each counted once, without those of other tensors."""
    left = {x.untyped_storage()._cdata for x in but}
    own = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(nbytes for storage, nbytes in own.items() if storage not in left)


def live(training: Training) -> Bytes:
    """Bytes between steps, by class."""
    grads, optimizer = training.grads, training.optimizer
    kept = optimizer._memory.kept
    parameters = [*training.model.stack.parameters(), *grads.frozen.values.values()]
    states = [each.state[x] for each in optimizer._inner for x in each.state]
    sums = [x for x in (*grads.buffers, *grads._seconds.values()) if not x.is_meta]
    return {
        "parameters": bytes_of(parameters),
        "gradients": bytes_of([*sums, *grads.slice_sums]),
        "fp32 masters": bytes_of(map(kept, optimizer.masters.values()), parameters),
        "optimizer": bytes_of(kept(x) for s in states for k, x in s.items() if k != "step"),
    }


def measured(
    mesh: Mesh, optim: OptimizerConfig, model: dict[str, Any], dtype: torch.dtype
) -> Costs:
    """Bytes of each class, and that data ranks send: each counted, and by arithmetic."""
    training = build_training(plan(**model, dtype=dtype), optim, mesh, train_steps=3)
    batches = batches_of(mesh, 2)
    training_step(training, batches[0], 1)
    with record(mesh) as recorder:
        training_step(training, batches[1], 2)
    training.optimizer.settle()
    sent: Bytes = {}
    entries = [each for each in recorder.entries if Path(each.ticket.file).stem in SENDERS]
    for name, count in recorder.bytes_per_axis(entries).items():
        axis = name.split("_")[0]
        sent[axis] = sent.get(axis, 0) + count
    config, itemsize = mesh.config, dtype.itemsize
    rule = optim.optimizer_factory
    stack = named_parameters(training.model.stack)
    tensors = held_tensors(stack, training.model.layouts, config, mesh.rank, rule)
    return (
        live(training),
        state_bytes(tensors, optim, config, itemsize),
        sent,
        data_bytes(tensors, optim, config, itemsize, BACKWARDS),
    )


def all_measured(mesh: Mesh, cases: Iterable[Case]) -> list[Costs]:
    return [measured(mesh, replace(ADAMW, **optim), *model) for *model, optim in cases]


BF16, FP32 = torch.bfloat16, torch.float32
MUON = {"optimizer_factory": MuonConfig()}
CASES: dict[str, tuple[dict[str, int], list[Case]]] = {
    "dp 2": (
        {"dp": 2},
        [
            (LLAMA_PLAN, FP32, {"zero_stage": 0}),
            (LLAMA_PLAN, BF16, {"zero_stage": 1}),
            (LLAMA_PLAN, FP32, {"zero_stage": 2}),
            (LLAMA_PLAN, FP32, {"zero_stage": 2, "reduce": "step"}),
            (LLAMA_PLAN, FP32, {"zero_stage": 2, "optimizer_factory": SGDConfig()}),
            (UNTIED_PLAN, FP32, {"zero_stage": 3}),
            (LLAMA_PLAN, BF16, {"zero_stage": 3, "regather": "step"}),
            (EXPERTS_PLAN, FP32, {"zero_stage": 1, "offload": True}),
            (EXPERTS_PLAN, FP32, {"zero_stage": 3, **MUON}),
            (WITH_ADAPTERS, FP32, {"zero_stage": 2}),
            (WITH_ADAPTERS, BF16, {"zero_stage": 3}),
            (WITH_ADAPTERS, FP32, {"zero_stage": 3, "regather": "step"}),
        ],
    ),
    "dp 4": (
        {"dp": 4},
        [
            (LLAMA_PLAN, BF16, {"zero_stage": 3, "state_dtype": "bfloat16"}),
            (LLAMA_PLAN, FP32, {"zero_stage": 3, "shard_ranks": 2}),
        ],
    ),
    "dp 4, ep 2": (
        {"dp": 4, "ep": 2},
        [
            (EXPERTS_PLAN, BF16, {"zero_stage": 2}),
            (EXPERTS_PLAN, FP32, {"zero_stage": 3}),
            (WITH_STACKS, BF16, {"zero_stage": 3}),
        ],
    ),
}


@pytest.mark.parametrize("layout", CASES)
def test_memory_and_messages_are_those_of_arithmetic(layout: str) -> None:
    axes, cases = CASES[layout]
    for rank in on_ranks(all_measured, cases, **axes):
        for (*_, optim), (found, wanted, sent, predicted) in zip(cases, rank, strict=True):
            for what, nbytes in wanted.items():
                assert found[what] == pytest.approx(nbytes, rel=0.02), (what, optim)
            assert sent.keys() == predicted.keys()
            for axis, nbytes in predicted.items():
                assert sent[axis] == pytest.approx(nbytes, rel=0.02), (axis, optim)
