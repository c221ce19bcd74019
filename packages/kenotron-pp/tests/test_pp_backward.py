"""The split of a backward pass, in one process: what runs when, what is freed, equal bits."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pp_models import VOCABULARY, WIDTH, Block, decoder, differences
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kenotron_dist import Axis
from kenotron_pp import Pipeline, Schedule, gpipe, zero_bubble_h1
from kenotron_pp.backward import _forgotten

PRODUCTS = {"mm", "addmm", "bmm", "embedding_dense_backward"}


class Counting(TorchDispatchMode):
    """Counts the products that run while a phase lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.count: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in PRODUCTS:
            self.count[self.phase, name] += 1
        return func(*args, **(kwargs or {}))


def in_phases(pipeline: Pipeline, counting: Counting) -> None:
    """Tell the counter which action runs."""
    splitter = pipeline._part.splitters[0]
    first = splitter.input_part

    def input_part(*args: Any) -> Any:
        counting.phase = "I"
        found, rest = first(*args)
        run = rest.run
        rest.run = lambda: (setattr(counting, "phase", "W"), run(), setattr(counting, "phase", ""))
        counting.phase = ""
        return found, rest

    splitter.input_part = input_part


def products(layers: Sequence[nn.Module], x: Tensor) -> dict[tuple[str, str], int]:
    """What I and W compute of one micro-batch of a zero-bubble schedule."""
    pipeline = Pipeline(layers, Axis.solo("pp"), zero_bubble_h1)
    counting = Counting()
    in_phases(pipeline, counting)
    with counting:
        pipeline.run([x], lambda y, m: y.float().square().sum())
    return {key: n for key, n in counting.count.items() if key[0]}


def alike(build: Callable[[], Sequence[nn.Module]], inputs: Sequence[Any]) -> None:
    """Split and whole backwards give the same bits."""
    models = []
    for schedule in (gpipe, zero_bubble_h1):
        torch.manual_seed(0)
        layers = build()
        pipeline = Pipeline(layers, Axis.solo("pp"), schedule)
        loss = pipeline.run(inputs, lambda y, m: y.square().sum() * (m + 1))
        models.append((loss, list(layers)))
    assert models[0][0] == models[1][0]
    assert not differences(dict(enumerate(models[1][1])), models[0][1])
    assert any(p.grad is not None for layer in models[0][1] for p in layer.parameters())


def test_no_weight_product_runs_in_the_input_part() -> None:
    found = products(decoder(5), torch.arange(6))  # two blocks of two linears, and the head
    assert found == {
        ("I", "mm"): 5,  # one for each linear: the gradient of its input
        ("W", "mm"): 5,
        ("W", "embedding_dense_backward"): 1,
    }


def test_the_first_layers_input_is_no_ones_gradient() -> None:
    layers = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    assert products(layers, torch.randn(3, WIDTH)) == {("I", "mm"): 1, ("W", "mm"): 2}


def test_recomputing_layers_give_their_weights_at_once_and_run_twice_at_most() -> None:
    runs = []

    class Noted(Block):
        def inner(self, x: Tensor) -> Tensor:
            runs.append(1)
            return super().inner(x)

    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Noted(recompute=True), nn.Linear(WIDTH, WIDTH)]
    found = products(layers, torch.randn(3, WIDTH))
    assert len(runs) == 2
    assert found["W", "mm"] == 2  # the plain layers around it
    assert found["I", "mm"] == 1 + 4 + 0  # the last one's input; both gradients of the block's two
    alike(lambda: [nn.Linear(WIDTH, WIDTH), Block(recompute=True)], [torch.randn(3, WIDTH)] * 3)


class Shared(nn.Module):
    """One linear at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(torch.sin(self.inner(x))))))


class Normed(nn.Module):
    """A weight that is computed from parameters, and cut in three."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.size = nn.Parameter(torch.rand(3 * WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (x @ (self.size * self.raw / self.raw.norm()).T).chunk(3, -1)
        return a * b + c


class Thrice(torch.autograd.Function):
    """A product whose backward is written in Python and may run once only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ran = False
        return 3 * x @ weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        assert not ctx.ran
        ctx.ran = True
        x, weight = ctx.saved_tensors
        return 3 * dy @ weight.T, 3 * x.T @ dy


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Thrice.apply(x, self.weight)


class OneHot(nn.Module):
    """Nothing in its graph leads to an input, not even a look-up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot(x, VOCABULARY).float() @ self.weight


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Recurrent(nn.Module):
    """Several outputs from one node, and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[None])[0][0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x[None], x[None], x[None], need_weights=False)[0][0]


@pytest.mark.parametrize(
    "kind", [Shared, Normed, Written, Frozen, Recurrent, Attention, nn.Identity]
)
def test_any_module_splits_with_the_same_bits(kind: Callable[[], nn.Module]) -> None:
    floats = list(torch.randn(3, 4, WIDTH))
    alike(lambda: [kind(), nn.LayerNorm(WIDTH), kind(), nn.Linear(WIDTH, 2)], floats)
    ids = list(torch.randint(VOCABULARY, (3, 4)))
    alike(lambda: [nn.Embedding(VOCABULARY, WIDTH), kind(), nn.Linear(WIDTH, 2), nn.ReLU()], ids)
    alike(lambda: [OneHot(), kind(), nn.Linear(WIDTH, 2)], ids)


def test_an_input_that_wants_a_gradient_gets_it() -> None:
    found = []
    for schedule in (gpipe, zero_bubble_h1):
        torch.manual_seed(0)
        leaf = torch.randn(4, WIDTH, requires_grad=True)
        layer = nn.Linear(WIDTH, WIDTH)
        Pipeline([layer], Axis.solo("pp"), schedule).run([leaf.sin()], lambda y, m: y.sum())
        found.append(leaf.grad)
    assert torch.equal(*found) and found[0].any()


class Deferring(nn.Linear):
    """Splits itself through the queue."""

    defers_weight_grad = True
    weight_queue: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return Deferred.apply(x, self.weight, self.weight_queue)


class Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, queue: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        if ctx.queue is None:
            return dy @ ctx.weight, dy.T @ x, None
        ctx.queue.push(ctx.weight, lambda: dy.T @ x)
        return dy @ ctx.weight, None, None


def test_a_chunk_that_begins_with_frozen_layers_counts_deferred_weights_once() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 2, bias=False), Deferring(2, 4, bias=False)]
    layers[0].requires_grad_(False)
    x = torch.ones(3, 4, dtype=torch.int64)
    found = []
    for schedule in (gpipe, zero_bubble_h1):
        first = Frozen(layers[0])
        Pipeline([first, *layers[1:]], Axis.solo("pp"), schedule).run([x, x], lambda y, m: y.sum())
        found.append([layer.weight.grad for layer in layers[1:]])
        for layer in layers:
            layer.weight.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Frozen(nn.Module):
    """A layer that does not learn, called with token numbers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float())


class Rerun(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Deferring(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda each: torch.tanh(self.inner(each)), x, use_reentrant=False)


def test_layers_that_defer_by_themselves_take_the_short_way() -> None:
    for kind in (lambda: Deferring(WIDTH, WIDTH, bias=False), Rerun):
        alike(
            lambda kind=kind: [kind(), nn.LayerNorm(WIDTH), kind()], list(torch.randn(3, 4, WIDTH))
        )
    layers = [Rerun(), Deferring(WIDTH, WIDTH, bias=False)]
    found = products(layers, torch.randn(3, WIDTH))
    assert found["W", "mm"] == 2  # also of the layer that recomputes
    assert found["I", "mm"] == 3  # the inputs' gradients, and the recomputed product
    assert layers[1].weight_queue is None


def test_reentrant_checkpointing_is_refused_in_every_schedule() -> None:
    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=True)

    for schedule in (gpipe, zero_bubble_h1):
        pipeline = Pipeline([nn.Linear(WIDTH, WIDTH), Old()], Axis.solo("pp"), schedule)
        with pytest.raises(ValueError, match="a layer uses torch.utils.checkpoint with use_reent"):
            pipeline.run([torch.randn(2, WIDTH)], lambda y, m: y.sum())


class Watched(nn.Module):
    """Linear, gelu, softmax, linear: notes what is alive of what it computed."""

    def __init__(self, alive: list[tuple[str, weakref.ref]]) -> None:
        super().__init__()
        self.up, self.down, self.alive = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), alive

    def forward(self, x: Tensor) -> Tensor:
        middle = self.up(x)
        soft = nn.functional.gelu(middle).softmax(-1)
        y = self.down(soft)
        for name, tensor in (("middle", middle), ("soft", soft), ("y", y)):
            self.alive.append((name, weakref.ref(tensor.untyped_storage())))
        return y


@pytest.mark.parametrize("recompute", [False, True])
def test_after_the_input_part_only_inputs_and_output_gradients_stay(recompute: bool) -> None:
    alive: list[tuple[str, weakref.ref]] = []
    between: list[list[str]] = []
    inner = Watched(alive)

    class Maybe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(inner, x, use_reentrant=False) if recompute else inner(x)

    def late(stage: int, n_stages: int, n_microbatches: int) -> list:
        order = zero_bubble_h1(stage, n_stages, n_microbatches)
        return [*(a for a in order if a.kind != "W"), *(a for a in order if a.kind == "W")]

    def note(module: nn.Module, args: tuple) -> None:
        between.append(sorted(name for name, ref in alive if ref() is not None))

    first = nn.Linear(WIDTH, WIDTH)
    first.register_forward_pre_hook(note)
    schedule = Schedule("late", late, splits=True)
    pipeline = Pipeline([first, Maybe()], Axis.solo("pp"), schedule)
    pipeline.run([torch.randn(2, WIDTH)] * 3, lambda y, m: y.square().sum())
    kept = [] if recompute else ["soft"]  # what the weight product of the second linear needs
    assert between == [[], kept, sorted(2 * kept)]
    assert not [name for name, ref in alive if ref() is not None]


def test_recomputing_changes_no_bit() -> None:
    models = []
    for recompute in (False, True):
        layers = decoder(5, recompute=recompute)
        inputs = list(torch.randint(VOCABULARY, (3, 4)))
        Pipeline(layers, Axis.solo("pp"), zero_bubble_h1).run(inputs, lambda y, m: y.sum())
        models.append(layers)
    assert not differences(dict(enumerate(models[0])), models[1])


def test_what_was_freed_is_not_used_again() -> None:
    with pytest.raises(RuntimeError, match="a tensor was freed after the input part of a split"):
        _forgotten(None)
