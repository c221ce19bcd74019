"""Balance losses of a micro-batch: their conventions' own formulas, on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kenotron_cp import cut_sequence
from kenotron_dist import Axis, Mesh, all_reduce
from kenotron_dist.testing import on_ranks
from kenotron_models import Build, Context, SequenceCut
from kenotron_models.layers import Experts, ExpertsSpec, RouterSpec
from kenotron_models.router_losses import LoadSums, balance, load_sums, over_ranks
from kenotron_tp import TPMode

BATCH, SEQUENCE, WIDTH, COEFFICIENT = 2, 10, 8, 0.4
SPEC: dict[str, Any] = {"experts": 6, "top_k": 2, "layers": 3, "balance_loss": COEFFICIENT}
TOKENS = BATCH * SEQUENCE


def drawn() -> tuple[list[Tensor], list[Tensor]]:
    """Inputs (B, S, D) and router weights (E, D) of three layers, fp64."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(3, BATCH, SEQUENCE, WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, 6, WIDTH, generator=generator, dtype=torch.float64)
    return [*inputs], [*weights]


def megatron(logits: list[Tensor]) -> Tensor:
    """Sum over layers of ``E / (K T^2) sum_i (choices of i) (sum of its probabilities)``."""
    total = torch.zeros((), dtype=torch.float64)
    for each in logits:
        shares = each.softmax(-1)
        chosen = torch.zeros_like(shares).scatter_(1, shares.topk(2).indices, 1.0)
        total = total + 6 / (2 * TOKENS**2) * (chosen.sum(0) * shares.sum(0)).sum()
    return total


def hugging_face(logits: list[Tensor]) -> Tensor:
    """``E sum_i (share of tokens that chose i) (mean probability)``, layers as one list."""
    shares = torch.cat(logits).softmax(-1)
    chosen = torch.zeros_like(shares).scatter_(1, shares.topk(2).indices, 1.0)
    return 6 * (chosen.mean(0) * shares.mean(0)).sum()


THEIRS = {"micro_batch": megatron, "all_layers": hugging_face}


def wanted(kind: str) -> tuple[float, list[Tensor]]:
    """Their loss, and its gradients of router weights."""
    inputs, weights = drawn()
    weights = [each.requires_grad_() for each in weights]
    logits = [x.flatten(0, 1) @ w.t() for x, w in zip(inputs, weights, strict=True)]
    loss = THEIRS[kind](logits)
    return loss.item(), [*torch.autograd.grad(COEFFICIENT * loss, weights)]


class Sink(list[Tensor]):
    """Losses that layers add."""

    def add(self, scalar: Tensor) -> None:
        self.append(scalar)


def router_gradients(mesh: Mesh, kind: str, recompute: bool, sequence: bool) -> list[Tensor]:
    """Gradients of router weights of three layers, whole."""
    tp, cp = mesh["tp"], mesh["cp"]
    build = Build(tp, TPMode(sequence_parallel=sequence), "cpu", torch.float64, mesh["ep"])
    spec = ExpertsSpec(router=RouterSpec(**SPEC, balance=kind), features=4)
    places = torch.arange(SEQUENCE).expand(BATCH, -1)
    context = Context(
        cut_sequence(places, cp),
        cut=SequenceCut(cp, places) if cp.size > 1 else None,
        padding_BS=cut_sequence(torch.zeros_like(places), cp, fill=1).bool(),
        loss_weight=torch.tensor(1 / TOKENS, dtype=torch.float64),
    )
    sink, routers = Sink(), []
    for layer, (x, weight) in enumerate(zip(*drawn(), strict=True)):
        experts = Experts(spec, WIDTH, build, layer=layer)
        experts.auxiliary_losses, experts.computed_again = sink, recompute
        with torch.no_grad():
            experts.router.weight.copy_(weight)
        own = torch.cat([cut_sequence(x[..., i].contiguous(), cp)[..., None] for i in range(8)], -1)
        flat = own.flatten(0, 1)
        flat = flat.chunk(tp.size)[tp.rank] if sequence else flat
        if recompute:
            y = torch.utils.checkpoint.checkpoint(experts, flat, context, use_reentrant=False)
        else:
            y = experts(flat, context)
        sink.append(0 * y.sum())
        routers.append(experts.router)
    total = torch.stack([*sink]).sum()
    assert total.item() == 0  # the reported loss is the cross entropy alone
    total.backward()
    found = [router.weight.grad for router in routers]
    return [all_reduce(all_reduce(grad, tp), cp) for grad in found if grad is not None]


LAYOUTS = [
    ({}, False, False), ({}, True, False), ({"tp": 2}, False, False),
    ({"tp": 2, "ep": 2}, False, True), ({"cp": 2, "ep": 2}, True, False),
    ({"cp": 2, "tp": 2, "ep": 2}, False, True),
]  # fmt: skip


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize(("axes", "recompute", "sequence"), LAYOUTS, ids=str)
def test_router_gradients_are_those_of_the_named_formula(
    kind: str, axes: dict[str, int], recompute: bool, sequence: bool
) -> None:
    _, gradients = wanted(kind)
    for found in on_ranks(router_gradients, kind, recompute, sequence, **axes):
        assert len(found) == 3
        for ours, theirs in zip(found, gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_micro_batches_of_samples_have_the_loss_of_samples() -> None:
    (x, *_), (weight, *_) = drawn()
    build, values = Build(Axis.solo("tp"), device=None, dtype=torch.float64), {}
    for kind in ("sample", "micro_batch"):
        spec = RouterSpec(**SPEC, balance=kind)  # pyrefly: ignore[bad-argument-type]
        router = Experts(ExpertsSpec(router=spec, features=4), WIDTH, build).router
        with torch.no_grad():
            router.weight.copy_(weight)
        rows = torch.zeros(SEQUENCE, dtype=torch.int64)
        sums = [load_sums([router(one)], spec, [rows], 1, over_ranks()) for one in x]
        values[kind] = [balance(each, spec).item() for each in sums]
        both = load_sums([router(x.flatten(0, 1))], spec, [rows.repeat(2)], 1, over_ranks())
        values["whole"] = [balance(both, spec).item()]
    assert values["sample"] == values["micro_batch"]
    assert values["whole"][0] != pytest.approx(sum(values["sample"]), rel=1e-3)


@pytest.mark.parametrize("kind", THEIRS)
def test_values_are_those_of_the_named_formula(kind: str) -> None:
    inputs, weights = drawn()
    spec = RouterSpec(**SPEC, balance=kind)  # pyrefly: ignore[bad-argument-type]
    build, total = Build(Axis.solo("tp"), device=None, dtype=torch.float64), 0.0
    earlier: list[LoadSums] = []
    for x, weight in zip(inputs, weights, strict=True):
        router = Experts(ExpertsSpec(router=spec, features=4), WIDTH, build).router
        with torch.no_grad():
            router.weight.copy_(weight)
        rows = torch.arange(BATCH).repeat_interleave(SEQUENCE)
        sums = load_sums([router(x.flatten(0, 1))], spec, [rows], BATCH, over_ranks())
        total += balance(sums, spec, earlier).item()
        earlier.append(sums)
    assert total / TOKENS == pytest.approx(wanted(kind)[0], rel=1e-6)
