"""What readers of this package broke once: hooks, unproven schedules, evaluation, odd input."""

from __future__ import annotations

import shutil
import weakref
from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron_dist import Axis, Mesh
from kenotron_dist.testing import on_ranks
from kenotron_pp import (
    Action,
    Pipeline,
    PipelineError,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)

SOLO = Axis.solo("pp")
WHOLE = [Action(kind, i) for kind in "FB" for i in range(2)]


class Recomputed(nn.Linear):
    """A layer whose weight gradients come in the input part."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def gradients(schedule: Schedule, layers: list[nn.Module], inputs: list) -> list[Tensor]:
    pipeline = Pipeline(layers, SOLO, schedule)
    pipeline.run(inputs, lambda y, m: y.square().sum())
    return [p.grad for layer in layers for p in layer.parameters()]


def hooked(schedule: Schedule) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Recomputed(4, 4), nn.Linear(4, 4)]
    fired: list[str] = []
    for layer in layers:
        weight = layer.get_parameter("weight")
        weight.register_hook(lambda g: g * 3)
        weight.register_post_accumulate_grad_hook(lambda p: fired.append("after"))
    return gradients(schedule, layers, list(torch.randn(2, 3, 4))), fired


def test_hooks_of_parameters_run_once_a_micro_batch() -> None:
    (expected, times), (found, same) = hooked(gpipe), hooked(zero_bubble_h1)
    assert len(times) == len(same) == 4
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (WHOLE[:-1], r"runs B of chunk 0 on micro-batches \[0\]"),
        ([*WHOLE[:2], WHOLE[3], WHOLE[2]], r"runs B of chunk 0 on micro-batches \[1, 0\]"),
        ([WHOLE[0], *WHOLE], r"runs F of chunk 0 on micro-batches \[0, 0, 1\]"),
        ([], r"runs F of chunk 0 on micro-batches \[\]"),
        ([*WHOLE, Action("W", 0)], "runs W0: it has kinds F, B and 1 chunks"),
    ],
)
def test_a_schedule_that_is_not_proven_is_not_run(actions: list[Action], words: str) -> None:
    pipeline = Pipeline([nn.Linear(4, 4)], SOLO, lambda rank, ranks, count: actions)
    with pytest.raises(ValueError, match=words):
        pipeline.run(list(torch.randn(2, 3, 4)), lambda y, m: y.sum())


def test_an_input_given_twice_gets_its_gradient_once() -> None:
    class Both(nn.Linear):
        def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
            return super().forward(x[0] + x[1])

    found = []
    for schedule in (gpipe, zero_bubble_h1):
        torch.manual_seed(0)
        x = torch.randn(3, 4, requires_grad=True)
        gradients(schedule, [Both(4, 4)], [(x, x)])
        found.append(x.grad)
    assert torch.equal(*found)


def test_evaluation_frees_each_output_when_its_loss_is_known() -> None:
    kept: list[weakref.ref] = []

    def loss(y: Tensor, microbatch: int) -> Tensor:
        assert all(each() is None for each in kept[:-1])
        kept.append(weakref.ref(y))
        return y.sum()

    pipeline = Pipeline([nn.Linear(4, 4)], SOLO)
    inputs = list(torch.randn(5, 3, 4))
    expected = sum(y.sum() for y in pipeline.forward(inputs))
    torch.testing.assert_close(pipeline.evaluate(inputs, loss), expected)
    assert len(kept) == 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it compiles
def test_layers_compiled_beside_others() -> None:
    if shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    found = []
    for schedule in (gpipe, zero_bubble_h1):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Linear(4, 4)]
        layers[1].compile()
        found.append(gradients(schedule, layers, list(torch.randn(2, 3, 4))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_what_cannot_be_run_is_named() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="1f1b has 1 chunk.s. a rank: give layers, or"):
        Pipeline([[layer], [layer]], SOLO, one_f_one_b)
    with pytest.raises(ValueError, match="schedule x has 3 chunks with wiring 'v', which has tw"):
        Schedule("x", lambda r, n, m: [], chunks=3, wiring="v")
    pipeline = Pipeline([layer], SOLO)
    with pytest.raises(ValueError, match="there are no micro-batches: give at least one input"):
        pipeline.run([], lambda y, m: y.sum())
    with pytest.raises(ValueError, match=r"inputs is one tensor \(3, 4\): give a list with one en"):
        pipeline.run(torch.randn(3, 4), lambda y, m: y.sum())
    with pytest.raises(ValueError, match=r"loss_fn returned a tensor \(3, 4\): return a scalar te"):
        pipeline.run([torch.randn(3, 4)], lambda y, m: y.square())
    with pytest.raises(ValueError, match="loss_fn returned float: return a scalar tensor, the los"):
        pipeline.run([torch.randn(3, 4)], lambda y, m: float(y.detach().sum()))
    with pytest.raises(ValueError, match="the loss needs no gradient, although parameters do"):
        pipeline.run([torch.randn(3, 4)], lambda y, m: y.detach().sum())
    pair = namedtuple("pair", "a b")
    with pytest.raises(TypeError, match="a pair as activation: layers pass on a tensor, a tuple"):
        pipeline.run([pair(torch.randn(3, 4), torch.randn(3, 4))], lambda y, m: y.sum())
    for schedule in (interleaved(2), zero_bubble_v):
        assert schedule.chunks == 2


class Meddling(nn.Linear):
    """Changes what it has returned before."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.last is not None:
            with torch.no_grad():
                self.last.mul_(2)
        self.last = super().forward(x)
        return self.last


def meddle(mesh: Mesh) -> str:
    pipeline = Pipeline(
        [Meddling(4, 4) if mesh.rank == 0 else nn.Linear(4, 4)], mesh["pp"], pairs=mesh.pairs("pp")
    )
    with pytest.raises(PipelineError) as caught:
        pipeline.run(list(torch.randn(6, 2, 4)), lambda y, m: y.sum())
    return str(caught.value)


def test_a_result_that_is_changed_while_it_is_sent_is_an_error() -> None:
    words = "what stage 0 returned for micro-batch 0 was changed in place while it was being sent"
    assert all(words in told for told in on_ranks(meddle, pp=2))


def uneven(mesh: Mesh) -> str:
    pipeline = Pipeline([nn.Linear(4, 4)], mesh["pp"], pairs=mesh.pairs("pp"))
    with pytest.raises(PipelineError) as caught:
        pipeline.run(list(torch.randn(4 + mesh.rank, 2, 4)), lambda y, m: y.sum())
    return str(caught.value)


def test_ranks_with_unlike_numbers_of_micro_batches_are_an_error() -> None:
    words = "the ranks of the pp axis were given [4, 5] micro-batches: give every rank the same"
    assert all(words in told for told in on_ranks(uneven, pp=2))


def inference(mesh: Mesh) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    own = layers[: 4 // mesh["pp"].size] if mesh.rank == 0 else layers[2:]
    pipeline = Pipeline(own, mesh["pp"], pairs=mesh.pairs("pp"))
    with torch.inference_mode():
        return [y.clone() for y in pipeline.forward(list(torch.ones(3, 2, 4)))]


def test_outputs_in_inference_mode() -> None:
    [one], [_, two] = on_ranks(inference), on_ranks(inference, pp=2)
    assert len(one) == 3 and all(map(torch.equal, one, two))
