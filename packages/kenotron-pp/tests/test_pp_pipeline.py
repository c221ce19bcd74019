"""The executor on real processes against one: losses and every gradient, bit for bit."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh, RankError, spawn
from kenotron_pp import Pipeline, Stages, gpipe, one_f_one_b

PRELOAD = ("torch._dynamo",)


@dataclass
class Scale:
    """A context: a number that each layer multiplies by."""

    factor: Tensor


class Scaled(nn.Module):
    """A layer that reads its micro-batch's context."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Scale | None = None) -> Tensor:
        y = torch.tanh(self.inner(x))
        return y if context is None else y * context.factor


def build(width: int, count: int) -> list[tuple[str, nn.Module]]:
    torch.manual_seed(0)
    return [(f"layers.{i}", Scaled(width)) for i in range(count)]


def batch(microbatches: int, rows: int, width: int) -> list[Tensor]:
    return list(torch.randn(microbatches, rows, width, generator=torch.Generator().manual_seed(1)))


def measure(
    mesh: Mesh, microbatches: int, count: int, schedule, dtype: torch.dtype, contexts: bool
) -> tuple[list[float], dict[str, list]]:
    """Two steps with different row counts; losses and gradients of this stage."""
    layers = [(name, layer.to(dtype)) for name, layer in build(6, count)]
    stages = Stages.balanced(layers, [1.0] * count, mesh["pp"].size)
    own = stages.own(layers, mesh["pp"].rank)
    twin = mesh.twin("pp") if contexts else None  # one group or two: the same numbers
    pipeline = Pipeline([layer for _, layer in own], mesh["pp"], schedule, upstream=twin)
    losses = []
    for rows in (4, 3):
        inputs = [x.to(dtype) for x in batch(microbatches, rows, 6)]
        given = [Scale(torch.tensor(1 + i / 8, dtype=dtype)) for i in range(microbatches)]

        def loss_fn(y: Tensor, m: int, inputs: list[Tensor] = inputs) -> Tensor:
            return (y - inputs[m]).float().square().sum() * (m + 1)

        losses.append(pipeline.run(inputs, loss_fn, given if contexts else None).item())
        losses.append(pipeline.evaluate(inputs, loss_fn, given if contexts else None).item())
    grads = {
        f"{name}.{key}": p.grad.float().tolist()
        for name, layer in own
        for key, p in layer.named_parameters()
    }
    return losses, grads


@pytest.mark.parametrize("schedule", [one_f_one_b, gpipe])
@pytest.mark.parametrize(
    ("pp", "microbatches", "count"), [(2, 3, 5), (2, 1, 2), (4, 2, 5), (4, 7, 4), (3, 3, 8)]
)
def test_a_pipeline_computes_what_one_process_computes(
    schedule, pp: int, microbatches: int, count: int
) -> None:
    for dtype, contexts in ((torch.float32, True), (torch.bfloat16, False)):
        rest = (microbatches, count, schedule, dtype, contexts)
        [(want, whole)] = spawn(measure, *rest, preload=PRELOAD)
        ranks = spawn(measure, *rest, pp=pp, preload=PRELOAD)
        assert all(losses == want for losses, _ in ranks)
        assert {name: g for _, grads in ranks for name, g in grads.items()} == whole


def outputs(mesh: Mesh) -> list[list]:
    layers = build(6, 4)
    own = Stages.balanced(layers, [1.0] * 4, mesh["pp"].size).own(layers, mesh["pp"].rank)
    found = Pipeline([layer for _, layer in own], mesh["pp"]).forward(batch(3, 2, 6))
    assert not any(y.requires_grad for y in found)
    return [y.tolist() for y in found]


def test_forward_gives_outputs_on_the_last_stage_only() -> None:
    [want] = spawn(outputs)
    assert spawn(outputs, pp=2) == [[], want]


def live_inputs(mesh: Mesh, schedule) -> int:
    """Most activations of earlier micro-batches still in memory when a forward begins."""
    layers = build(6, 2)
    own = Stages.balanced(layers, [1.0] * 2, 2).own(layers, mesh["pp"].rank)
    alive: list[weakref.ref] = []
    most = 0

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal most
        gc.collect()
        alive.append(weakref.ref(args[0]))
        most = max(most, sum(ref() is not None for ref in alive))

    own[0][1].register_forward_pre_hook(note)
    pipeline = Pipeline([layer for _, layer in own], mesh["pp"], schedule)
    make = [torch.randn(4, 6) for _ in range(8)] if mesh["pp"].rank else batch(8, 4, 6)
    pipeline.run(make, lambda y, m: y.sum())
    return most


def test_1f1b_frees_activations_as_it_goes() -> None:
    assert spawn(live_inputs, one_f_one_b, pp=2)[1] == 1
    assert spawn(live_inputs, gpipe, pp=2)[1] == 8


def mismatched(mesh: Mesh) -> None:
    Pipeline([nn.Identity()], mesh["pp"]).run([torch.ones(1)], lambda y, m: y.sum(), [])


class Odd(nn.Module):
    """Returns what cannot travel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64)


def odd_dtype(mesh: Mesh) -> None:
    Pipeline([Odd()], mesh["pp"]).run([torch.ones(1)], lambda y, m: y.sum())


def test_errors_are_sentences() -> None:
    with pytest.raises(RankError, match="1 micro-batches were given 0 contexts"):
        spawn(mismatched)
    with pytest.raises(RankError, match="a stage returned torch.complex64"):
        spawn(odd_dtype, pp=2)


class Shapeless(nn.Module):
    """Its output's shape depends on more than the shape of the tokens."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Shapeless.calls += 1
        return x[: Shapeless.calls]


def changing_shape(mesh: Mesh) -> None:
    Pipeline([Shapeless()], mesh["pp"], gpipe).run([torch.ones(4)] * 2, lambda y, m: y.sum())


def test_a_shape_that_changes_unannounced_is_named() -> None:
    with pytest.raises(RankError, match=r"stage 0 sends .*\(2,\), False\),\) for micro-batch 1"):
        spawn(changing_shape, pp=2)
