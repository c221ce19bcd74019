"""The executor on real processes against one: losses and every gradient, bit for bit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh, RankError
from kenotron_dist.testing import on_ranks
from kenotron_pp import (
    AuxiliaryLosses,
    Pipeline,
    Schedule,
    Stages,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    zero_bubble_h1,
    zero_bubble_v,
)


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
    one_group = mesh.backend == "gloo" and not contexts  # the same numbers
    pairs = None if one_group else mesh.pairs("pp")
    pipeline = Pipeline([layer for _, layer in own], mesh["pp"], schedule, pairs=pairs)
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
        [(want, whole)] = on_ranks(measure, *rest)
        ranks = on_ranks(measure, *rest, pp=pp)
        assert all(losses == want for losses, _ in ranks)
        assert {name: g for _, grads in ranks for name, g in grads.items()} == whole


COUNTED = """
import sys
import torch
from test_pp_pipeline import measure
from kenotron_dist.testing import on_ranks
from kenotron_pp import one_f_one_b

if __name__ == "__main__":
    rest = (3, 5, one_f_one_b, torch.float32)
    ranks = on_ranks(measure, *rest, True, pp=int(sys.argv[1]), seconds=20)
    assert [losses for losses, _ in ranks] == [on_ranks(measure, *rest, True)[0][0]] * len(ranks)
    on_ranks(measure, *rest, False, pp=2)  # without groups of two
"""


@pytest.mark.gloo(reason="NCCL counts batches")
@pytest.mark.parametrize("pp", [2, 4])
def test_the_loss_leaves_at_the_end_where_torch_counts_transfers(tmp_path, pp: int) -> None:
    """With DETAIL a broadcast that leaves early would wait for ranks that wait for this one."""
    (tmp_path / "program.py").write_text(COUNTED)
    done = subprocess.run(
        [sys.executable, "program.py", str(pp)],
        cwd=tmp_path,
        env=os.environ
        | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    words = "transfers need groups of their own, pass pairs=mesh.pairs"
    assert words in done.stderr and "AssertionError" not in done.stderr


def outputs(mesh: Mesh) -> list[list]:
    layers = build(6, 4)
    own = Stages.balanced(layers, [1.0] * 4, mesh["pp"].size).own(layers, mesh["pp"].rank)
    found = Pipeline([layer for _, layer in own], mesh["pp"], pairs=mesh.pairs("pp")).forward(
        batch(3, 2, 6)
    )
    assert not any(y.requires_grad for y in found)
    return [y.tolist() for y in found]


def test_forward_gives_outputs_on_the_last_stage_only() -> None:
    [want] = on_ranks(outputs)
    assert on_ranks(outputs, pp=2) == [[], want]


def live_inputs(mesh: Mesh, schedule) -> int:
    """Most activations of this and earlier micro-batches in memory when a forward begins."""
    gc.collect()
    gc.freeze()  # what is collected later is ours: quick
    layers = build(6, 2 * mesh["pp"].size)
    stages = Stages.balanced(layers, [1.0] * len(layers), mesh["pp"].size, schedule)
    chunks = stages.chunks(layers, mesh["pp"].rank)
    alive: list[weakref.ref] = []
    most = 0

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal most
        gc.collect()
        alive.append(weakref.ref(args[0].untyped_storage()))
        most = max(most, sum(ref() is not None for ref in alive))

    lists = [[layer for _, layer in chunk] for chunk in chunks]
    for chunk in lists:
        chunk[0].register_forward_pre_hook(note)
    pipeline = Pipeline(
        lists if schedule.chunks > 1 else lists[0], mesh["pp"], schedule, pairs=mesh.pairs("pp")
    )
    first = mesh["pp"].rank == 0
    make = batch(8, 4, 6) if not first else [torch.ones(4, 6)] * 8  # all one: no activation
    pipeline.run(make, lambda y, m: y.sum())
    return most


@pytest.mark.parametrize(
    "schedule",
    [gpipe, one_f_one_b, interleaved(2), zero_bubble_h1, zero_bubble_v],
    ids=lambda schedule: schedule.name,
)
def test_no_more_activations_live_than_the_simulation_says(schedule) -> None:
    trace = simulate(schedule, 3, 8)
    allowed = trace.peak_kept if schedule.splits else trace.peak_live
    found = on_ranks(live_inputs, schedule, pp=3)
    posted_ahead = 1
    for rank in (1, 2):
        assert found[rank] <= allowed[rank] + posted_ahead
    if schedule is gpipe:
        assert found[2] == 8
    if schedule is one_f_one_b:
        assert found[2] == 1


def sent_outputs(mesh: Mesh, schedule) -> int:
    """Most outputs of the first stage in memory at once: the graph does not need them."""
    gc.collect()
    gc.freeze()
    alive: list[weakref.ref] = []
    most = 0

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal most
            y = x + 1
            alive.append(weakref.ref(y.untyped_storage()))
            gc.collect()
            most = max(most, sum(ref() is not None for ref in alive))
            return y

    layers = [nn.Linear(6, 6), Last() if mesh["pp"].rank == 0 else nn.Linear(6, 6)]
    pipeline = Pipeline(layers, mesh["pp"], schedule, pairs=mesh.pairs("pp"))
    pipeline.run(batch(8, 4, 6), lambda y, m: y.sum())
    return most


def test_sent_outputs_are_freed_while_their_graph_lives() -> None:
    assert on_ranks(sent_outputs, gpipe, pp=2)[0] <= 3


class Cut(nn.Module):
    """Returns parts of a larger tensor, not contiguous, that keep their values on the way."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = torch.arange(24.0).view(4, 6)
        return (x + whole)[:, 1:3], (x + whole).T, x[0, 0] + 1


class Look(nn.Module):
    seen: list

    def forward(self, parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        self.seen = [(part.tolist(), part.untyped_storage().nbytes()) for part in parts]
        return parts[0].sum() + parts[1].sum() * 0 + parts[2]


def views(mesh: Mesh) -> list:
    layer = [Cut(), Look()][mesh["pp"].rank]
    x = torch.zeros(4, 6)
    Pipeline([layer], mesh["pp"], pairs=mesh.pairs("pp")).forward([x])
    return getattr(layer, "seen", [])


def test_of_a_view_only_its_elements_travel() -> None:
    whole = torch.arange(24.0).view(4, 6)
    want = [whole[:, 1:3], whole.T, torch.tensor(1.0)]
    found = on_ranks(views, pp=2)[1]
    assert found == [(part.tolist(), part.numel() * 4) for part in want]


def mismatched(mesh: Mesh) -> None:
    Pipeline([nn.Identity()], mesh["pp"], pairs=mesh.pairs("pp")).run(
        [torch.ones(1)], lambda y, m: y.sum(), []
    )


def wrong_chunks(mesh: Mesh) -> None:
    Pipeline([nn.Identity(), nn.Identity()], mesh["pp"], interleaved(2))


class Strange(nn.Module):
    """Returns no activation."""

    def __init__(self, what: object) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> object:
        return self.what


def strange(mesh: Mesh, what: object) -> None:
    Pipeline([Strange(what)], mesh["pp"], pairs=mesh.pairs("pp")).run(
        [torch.ones(1)], lambda y, m: y.sum()
    )


class Odd(nn.Module):
    """Returns what cannot travel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64)


def odd_dtype(mesh: Mesh) -> None:
    Pipeline([Odd()], mesh["pp"], pairs=mesh.pairs("pp")).run([torch.ones(1)], lambda y, m: y.sum())


def test_errors_are_sentences() -> None:
    with pytest.raises(RankError, match="1 micro-batches were given 0 contexts"):
        on_ranks(mismatched)
    with pytest.raises(RankError, match="a stage returned torch.complex64"):
        on_ranks(odd_dtype, pp=2)


def test_what_is_no_activation_is_named() -> None:
    for what, words in (
        ([torch.ones(1)], "a list as activation: layers pass on a tensor, a tuple"),
        ((torch.ones(1), 3), "a tuple with int in it: layers pass on"),
        ({1: torch.ones(1)}, "a dict as activation: layers pass on"),
    ):
        with pytest.raises(RankError, match=words):
            on_ranks(strange, what, pp=2)
    with pytest.raises(RankError, match="interleaved-2 has 2 chunks a rank: give one list of laye"):
        on_ranks(wrong_chunks)


class Unsummed(nn.Module):
    """Adds a loss that is no scalar."""

    adds_loss = True
    auxiliary_losses: AuxiliaryLosses

    def forward(self, x: Tensor) -> Tensor:
        self.auxiliary_losses.add(x)
        return x


def unsummed(mesh: Mesh) -> None:
    Pipeline([Unsummed()], mesh["pp"], pairs=mesh.pairs("pp")).run(
        [torch.ones(2)], lambda y, m: y.sum()
    )


def test_an_added_loss_is_a_scalar() -> None:
    with pytest.raises(RankError, match=r"an auxiliary loss has shape \[2\]: add a scalar"):
        on_ranks(unsummed)


class Shapeless(nn.Module):
    """Its output's shape depends on more than the shape of the tokens."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Shapeless.calls += 1
        return x[: Shapeless.calls]


def changing_shape(mesh: Mesh) -> None:
    Pipeline([Shapeless()], mesh["pp"], gpipe, pairs=mesh.pairs("pp")).run(
        [torch.ones(4)] * 2, lambda y, m: y.sum()
    )


def test_a_shape_that_changes_unannounced_is_named() -> None:
    with pytest.raises(RankError, match=r"stage 0 sends .*\(2,\), False\),\) for micro-batch 1"):
        on_ranks(changing_shape, pp=2)


def named_layers(mesh: Mesh, schedule: Schedule) -> float:
    torch.manual_seed(0)
    layers = [(f"layer{i}", nn.Linear(4, 4)) for i in range(4)]
    stages = Stages.balanced(layers, [1.0] * 4, mesh.sizes["pp"], schedule=schedule)
    given = [stages.chunks(layers, mesh["pp"].rank)]
    given += [stages.own(layers, mesh["pp"].rank)] if schedule.chunks == 1 else []
    pipelines = [Pipeline(each, mesh["pp"], schedule, pairs=mesh.pairs("pp")) for each in given]
    inputs = [torch.ones(2, 4)] * 2
    losses = {float(pipeline.run(inputs, lambda y, m: y.sum())) for pipeline in pipelines}
    assert len(losses) == 1
    return losses.pop()


@pytest.mark.smoke
def test_layers_may_come_as_stages_hand_them_out() -> None:
    one = on_ranks(named_layers, one_f_one_b)[0]
    assert on_ranks(named_layers, one_f_one_b, pp=2) == pytest.approx([one] * 2)
    assert on_ranks(named_layers, interleaved(2), pp=2) == pytest.approx([one] * 2)
