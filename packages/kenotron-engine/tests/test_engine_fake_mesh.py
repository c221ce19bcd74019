"""Ranks of a world that does not exist communicate, on meta, as those of one that does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import EXPERTS, LLAMA, batches_of, plan, training_of

from kenotron_dist import Mesh
from kenotron_dist.diagnosis import Entry, record
from kenotron_dist.testing import on_fake_ranks, on_ranks
from kenotron_engine import training_step
from kenotron_optim import MuonConfig
from kenotron_pp import schedule_named
from kenotron_tp import TPMode

SP = TPMode(sequence_parallel=True)
CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "pp dp tp": ({"pp": 2, "dp": 2, "tp": 2}, {}, {}),
    "pp 4": ({"pp": 4}, {"recompute": "full"}, {}),
    "zero bubble": ({"pp": 4}, {"schedule": schedule_named("zb-h1")}, {}),
    "zb-v": ({"pp": 2, "dp": 2}, {"schedule": schedule_named("zb-v")}, {"zero_stage": 2}),
    "interleaved": ({"pp": 2, "tp": 2}, {"schedule": schedule_named("interleaved")}, {}),
    "cp": ({"cp": 2, "tp": 2}, {"mode": SP}, {}),
    "cp pp": ({"cp": 2, "pp": 2}, {}, {}),
    "overlap": ({"tp": 2, "dp": 2}, {"mode": replace(SP, overlap=True)}, {}),
    "zero 3": ({"dp": 4}, {"dtype": torch.bfloat16}, {"zero_stage": 3}),
    "zero 3 step": ({"dp": 2, "tp": 2}, {}, {"zero_stage": 3, "regather": "step"}),
    "muon": ({"dp": 2, "tp": 2}, {}, {"optimizer_factory": MuonConfig()}),
    "mtp": ({"pp": 2}, {"spec": replace(LLAMA.decoder, mtp_weight=0.3)}, {}),
}
MOE: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "tp": ({"tp": 2}, {}, {}),
    "ep": ({"dp": 2, "ep": 2}, {}, {"zero_stage": 2}),
    "ep chunks": ({"dp": 2, "tp": 2, "ep": 4}, {"ep_chunks": 2}, {}),
    "ep pp": ({"pp": 2, "dp": 2, "ep": 2}, {}, {"zero_stage": 3}),
}
Seen = tuple[Any, ...]


def communicated(mesh: Mesh, of: dict[str, Any], optim: dict[str, Any]) -> list[Seen]:
    """What this rank sends and receives from the first weights to the end of a step, in order."""
    with record(mesh) as recorder:
        training = training_of(mesh, plan(**of), **optim)
        training_step(training, batches_of(mesh, 1)[0].to(mesh.device), 1)
        return list(seen(recorder.entries))


def seen(entries: list[Entry]) -> Iterator[Seen]:
    """All of each entry but who called."""
    for entry in entries:
        where, *rest = entry
        yield (where.channel, where.operation, *rest)


def where(mesh: Mesh) -> tuple[int, int, bool]:
    return mesh.rank, mesh.world.size, mesh.is_fake


@pytest.mark.parametrize("name", CASES)
@pytest.mark.by_turns(4)
def test_each_rank_communicates_what_a_real_one_does(name: str) -> None:
    """Operations, their order, lines, dtypes, shapes and bytes."""
    sizes, *given = CASES[name]
    real = on_ranks(communicated, *given, backend="fake_nccl", **sizes)
    ranks = len(real)
    assert on_fake_ranks(where, **sizes) == [(rank, ranks, True) for rank in range(ranks)]
    for ours, theirs in zip(on_fake_ranks(communicated, *given, **sizes), real, strict=True):
        assert ours == theirs
        assert len(ours) > 10


@pytest.mark.parametrize("name", MOE)
@pytest.mark.by_turns(2)
def test_experts_are_chosen_equally_often(name: str) -> None:
    """How many rows travel depends on the tokens; all else is that of a real rank."""
    sizes, of, optim = MOE[name]
    of = {"spec": EXPERTS.decoder} | of
    real = on_ranks(communicated, of, optim, backend="fake_nccl", **sizes)
    for ours, theirs in zip(on_fake_ranks(communicated, of, optim, **sizes), real, strict=True):
        assert [each[:3] for each in ours] == [each[:3] for each in theirs]
        alike = [a == b for a, b in zip(ours, theirs, strict=True)]
        assert sum(alike) > len(alike) / 2
