"""A reproducible plan: one sample at a time, sums in one order, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import engine_cases as cases
import pytest
import torch

from kenotron_dist import Mesh, tree_sum
from kenotron_dist.testing import on_ranks
from kenotron_engine import build_training, decoder_layers, gradients_of, training_step
from kenotron_engine.sample_order import check_sample_order, one_by_one, rows_of_all, sum_of_rows
from kenotron_models import virtual_shards
from kenotron_optim import ExactNorm, MuonConfig, SampleGradients

PLAIN = {"optimizer_factory": replace(cases.ADAMW.optimizer_factory, torch_adam_is_fused=False)}
SPEC = cases.LLAMA.decoder
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compile": ({"compile": True}, {}),
    "virtual_chunks = 3, which is no power of two": ({"virtual_chunks": 3}, {}),
    "cuda_graph": ({"cuda_graph": True}, {}),
    "float16": ({"dtype": torch.float16}, {}),
    "torch_adam_is_fused": ({}, {"optimizer_factory": cases.ADAMW.optimizer_factory}),
    "the fused kernel": ({}, {"optimizer_factory": MuonConfig(torch_adam_is_fused=True)}),
}


def test_rows_become_micro_batches() -> None:
    batch = cases.batches_of(Mesh.connect(), 1)[0]
    alone = one_by_one(batch)
    assert len(alone) == cases.ROWS * 2 == batch.samples_MB.numel()
    assert torch.equal(alone.tokens_MBS[:, 0], batch.tokens_MBS.flatten(0, 1))
    assert torch.equal(alone.samples_MB[:, 0], batch.samples_MB.flatten())
    assert alone.documents_MBS is None


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 13])
def test_rows_are_added_in_the_tree(rows: int) -> None:
    values = torch.randn(rows, 2) * 10 ** torch.randn(rows, 1)
    assert torch.equal(sum_of_rows(values), tree_sum(values.clone()))


def gathered(mesh: Mesh) -> list[float]:
    last = mesh["pp"].rank == mesh["pp"].size - 1
    own = [torch.tensor([mesh["dp"].rank * 10.0 + i], dtype=torch.float64) for i in range(2)]
    return rows_of_all(mesh, own if last else [], 2, 1).flatten().tolist()


def test_all_ranks_have_the_rows_in_order() -> None:
    assert on_ranks(gathered, pp=2, dp=2) == [[0.0, 1.0, 10.0, 11.0]] * 4


def gathered_chunks(mesh: Mesh) -> list[float]:
    """Two samples of each data rank, each in four chunks: sample, then chunk."""
    data, part, each = mesh["dp"].rank, mesh["cp"], 4 // mesh["cp"].size
    own = [
        torch.tensor([10.0 * (2 * data + i) + part.rank * each + chunk], dtype=torch.float64)
        for i in range(2)
        for chunk in range(each)
    ]
    return rows_of_all(mesh, own, 2, 1, 4).flatten().tolist()


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_chunks_of_all_samples_follow_one_another(cp: int) -> None:
    want = [10.0 * sample + chunk for chunk in range(4) for sample in range(4)]
    assert on_ranks(gathered_chunks, dp=2, cp=cp) == [want] * 2 * cp


def step(mesh: Mesh, z_loss: float) -> tuple[list[Any], str]:
    spec = replace(SPEC, z_loss=z_loss)
    plan = cases.plan(reproducible=True, spec=spec, virtual_shards=virtual_shards(spec, 8))
    training = cases.training_of(mesh, plan, **PLAIN)
    assert isinstance(training.grads, SampleGradients) and isinstance(training.norm, ExactNorm)
    found = []
    for number, batch in enumerate(cases.batches_of(mesh, 2), 1):
        loss, _ = gradients_of(training, batch, number)
        result = training_step(training, batch, number)
        assert loss == result.loss
        found.append((result.loss, result.minimised, result.grad_norm))
    return found, str(training.optimizer.stage)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_losses_and_reports_are_the_same_on_every_cut(z_loss: float) -> None:
    [(want, _)] = on_ranks(step, z_loss)
    for sizes in ({"dp": 2}, {"dp": 4}, {"pp": 2, "dp": 2}, {"tp": 2}):
        assert all(rank[0] == want for rank in on_ranks(step, z_loss, **sizes))


def dropped(mesh: Mesh, **how: Any) -> float:
    """The loss with much dropout."""
    blocks = tuple(
        replace(block, dropout=0.3, mixer=replace(block.mixer, dropout=0.3))
        for block in SPEC.blocks
    )
    spec = replace(SPEC, embedding_dropout=0.3, blocks=blocks)
    training = cases.training_of(mesh, cases.plan(spec=spec, **how), **PLAIN)
    return gradients_of(training, cases.batches_of(mesh, 1)[0], 1)[0]


@pytest.mark.parametrize(
    "how",
    [{"virtual_shards": 4}, {"virtual_chunks": 4}, {"virtual_chunks": 2, "virtual_shards": 2}],
)
def test_virtual_ranks_drop_what_a_usual_training_drops(how: dict[str, int]) -> None:
    [usual], [exact] = on_ranks(dropped), on_ranks(partial(dropped, reproducible=True, **how))
    assert exact == pytest.approx(usual, rel=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proved_is_refused(name: str) -> None:
    plan, optim = REFUSED[name]
    with pytest.raises(ValueError, match=name):
        of = cases.plan(**{"reproducible": True, **plan})
        cases.training_of(Mesh.connect(), of, **{**PLAIN, **optim})


def other_axis(mesh: Mesh, name: str, how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"reproducible: true was given with {name}"):
        cases.training_of(mesh, cases.plan(reproducible=True, **how), **PLAIN)


@pytest.mark.parametrize(
    ("axis", "name", "how"),
    [
        ("cp", "cp = 2", {}),
        ("tp", "tp = 2 and virtual_shards = 1", {}),
    ],
)
def test_other_axes_are_refused(axis: str, name: str, how: dict[str, Any]) -> None:
    on_ranks(other_axis, name, how, **{axis: 2})


def test_layers_of_ones_own_are_refused() -> None:
    mesh, plan = Mesh.connect(), cases.plan(reproducible=True)
    optim = replace(cases.ADAMW, **PLAIN)
    with pytest.raises(ValueError, match="layers that are not of the plan's spec"):
        build_training(plan, optim, mesh, 4, layers=decoder_layers(plan, mesh))


def test_gpus_are_taken_and_unknown_devices_refused() -> None:
    mesh, plan = Mesh.connect(), cases.plan(reproducible=True)
    optim = replace(cases.ADAMW, **PLAIN)
    for device in ("cuda:0", "meta"):
        on_it = Mesh(mesh.config, 0, torch.device(device))
        check_sample_order(plan, optim, on_it, own_layers=False)
    with pytest.raises(ValueError, match="was given with device mps:0: leave one of them out"):
        on_it = Mesh(mesh.config, 0, torch.device("mps:0"))
        check_sample_order(plan, optim, on_it, own_layers=False)
