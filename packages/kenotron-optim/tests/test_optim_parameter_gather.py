"""Parameters that travel behind the next forward: complete wherever they are read."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Handle, Mesh, RankError, gather_pieces
from kenotron_dist.placement import Tie, named_parameters, parameter_layouts, tie_storages
from kenotron_dist.testing import on_ranks
from kenotron_optim import (
    GradAccumulator,
    SlicedOptimizer,
    decay_groups,
    parameter_gather,
    parameter_groups,
)

SMALL = 1e-4  # MiB of a bucket: about one parameter each
READERS = ["forward", "state", "wanted", "reload", "prepare", "wait_for_parameters"]


class Table(nn.Module):
    """Rows of an embedding, or of the head tied to it, which the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 7 * 6).view(7, 6))
        self.placements = {"weight": Tie("embedding.weight")}

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[x] if x.dtype == torch.int64 else x


class Tied(nn.Module):
    """Layers in the order of the forward; one parameter is frozen, and the head tied."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = Table()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.second = nn.Linear(6, 6)
        self.second.bias.requires_grad_(requires_grad=False)
        self.head = Table()
        self.to(dtype)
        tie_storages(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in (self.first, self.second, self.head):
            x = layer(x)
        logits = x @ self.head.weight.t()  # read outside of the head's forward
        return nn.functional.cross_entropy(logits.float(), ids.roll(1), reduction="sum")


class Trained:
    """A model, and what trains it."""

    def __init__(
        self, mesh: Mesh, dtype: torch.dtype = torch.float32, overlap: bool = True
    ) -> None:
        self.model, self.mesh = Tied(dtype), mesh
        layouts = parameter_layouts(self.model, mesh.sizes)
        self.grads = GradAccumulator(named_parameters(self.model), layouts, mesh, bucket_mb=SMALL)
        groups = parameter_groups(self.grads.names, 0.1)
        self.optimizer = SlicedOptimizer(self.grads, _adamw, groups)
        if overlap:
            self.optimizer.overlap_forward(self.model.children())

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(7, (2, 8), generator=generator)
        self.grads.start(2)
        losses = []
        for micro in (ids + self.mesh["dp"].rank) % 7:
            loss = self.model(micro)
            loss.backward()
            losses.append(loss.item())
        self.optimizer.step(self.grads.finish(), lr=0.05)
        return sum(losses)

    def parameters(self) -> list[Tensor]:
        return [p.detach().float().clone() for p in self.model.parameters()]


def _adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, foreach=False)


def late_gather(pieces, axis) -> Handle:
    """A gather that begins when it is waited for; what it will overwrite is nan until then."""
    others = [x for rank, own in enumerate(pieces) if rank != axis.rank for x in own]
    for x in others:
        x.fill_(torch.nan)
    return Handle(None, lambda: gather_pieces(pieces, axis))


def trained(mesh: Mesh, dtype: torch.dtype, late: bool) -> list:
    """Losses and parameters after some steps, overlapped or not."""
    gather = late_gather if late else gather_pieces
    with mock.patch.object(parameter_gather, "gather_pieces", gather):
        own = [Trained(mesh, dtype, overlap) for overlap in (False, True)]
        losses = [[each.step(i) for i in range(5)] for each in own]
        own[1].optimizer.wait_for_parameters()
        return [*losses, *([p.tolist() for p in each.parameters()] for each in own)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dp", [2, 3])
def test_bits_are_those_of_waiting_at_once(dp: int, dtype: torch.dtype, late: bool) -> None:
    for at_once, behind, first, second in on_ranks(trained, dtype, late, dp=dp):
        assert behind == at_once and second == first


def read_in_flight(mesh: Mesh, reader: str) -> tuple[bool, list[float]]:
    """Read parameters in one way right after an update whose gathers take long."""
    with mock.patch("kenotron_dist.proof.fake_work._DELAY", 0.1):
        own = Trained(mesh)
        own.step(0)
        in_flight = any(p.isnan().any() for p in own.parameters())
        found = []
        if reader == "forward":
            found = [own.model(torch.arange(7))]
        else:
            getattr(own.optimizer, reader)()
        return in_flight, [float(x.sum()) for x in found + own.parameters()]


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_finds_complete_parameters(reader: str) -> None:
    ranks = on_ranks(read_in_flight, reader, dp=2, backend="fake_nccl")
    assert all(in_flight for in_flight, _ in ranks)  # else this shows nothing
    assert ranks[0] == ranks[1]  # and nan is not equal to itself


class Log:
    """What happens, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._started = 0

    def gather(self, pieces, axis) -> Handle:
        number, self._started = self._started, self._started + 1
        self.events.append(f"start {number}")
        handle = gather_pieces(pieces, axis)

        def land() -> Handle:
            self.events.append(f"land {number}")
            return handle

        return Handle(None, land)

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_children():
            module.register_forward_hook(lambda *_, name=name: self.events.append(name))

    def cut(self) -> list[str]:
        found, self.events, self._started = self.events, [], 0
        return found


def events(mesh: Mesh) -> list[list[str]]:
    """What happens in an update, in a forward, in a second one, and in updates in a row."""
    log = Log()
    with mock.patch.object(parameter_gather, "gather_pieces", log.gather):
        own = Trained(mesh)
        log.watch(own.model)
        own.step(0)
        log.events = log.events[-len(own.optimizer._gathers.groups) :]
        found = [log.cut()]
        for _ in range(2):
            own.model(torch.arange(7))
            found.append(log.cut())
        assert not any(m._forward_pre_hooks for m in own.model.modules())
        for inner in own.optimizer._inner:
            inner.register_step_pre_hook(lambda *_: log.events.append("update"))
        own.grads.start()
        slices = own.grads.finish()
        for _ in range(2):
            own.optimizer.publish()
            log._started = 0
        own.optimizer.step(slices, lr=0.0)
        return [*found, log.cut()]


def test_a_module_waits_for_what_it_reads_and_nothing_else() -> None:
    for update, forward, again, in_a_row in on_ranks(events, dp=2):
        assert update == [f"start {i}" for i in range(6)]
        assert forward == ["land 0", "embedding"] + [f"land {i}" for i in range(1, 5)] + [
            "first", "land 5", "second", "head",
        ]  # fmt: skip
        assert again == ["embedding", "first", "second", "head"]
        land = [f"land {i}" for i in range(6)]
        assert in_a_row == [
            *update,
            *land,
            *update,
            *land,
            "update",
            *(f"start {i}" for i in range(6)),
        ]


LAYERS, DELAY, LAYER = 6, 0.05, 0.06  # a gather, one after another; a layer


def time_of_step(mesh: Mesh, overlap: bool) -> float:
    """A step without its backward on a clock that gathers and layers move on."""
    now = arrived = 0.0

    def slow(pieces, axis) -> Handle:
        nonlocal arrived
        end = arrived = max(arrived, now) + DELAY
        handle = gather_pieces(pieces, axis)

        def land() -> Handle:
            nonlocal now
            now = max(now, end)
            return handle

        return Handle(None, land)

    def compute(*_) -> None:
        nonlocal now
        now += LAYER

    layers = [nn.Linear(6, 6, bias=False) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh, bucket_mb=SMALL)
    optimizer = SlicedOptimizer(grads, _adamw, parameter_groups(grads.names, 0.1))
    if overlap:
        optimizer.overlap_forward(layers)
    for layer in layers:
        layer.register_forward_hook(compute)
    with mock.patch.object(parameter_gather, "gather_pieces", slow):
        optimizer.publish()
        model(torch.ones(6))
    return now


def test_a_step_takes_the_longer_of_gathers_and_forward_not_the_sum() -> None:
    """All but the first gather are hidden."""
    at_once, behind = (on_ranks(time_of_step, each, dp=2) for each in (False, True))
    assert at_once == pytest.approx([LAYERS * (DELAY + LAYER)] * 2)
    assert behind == pytest.approx([DELAY + LAYERS * LAYER] * 2)


def incomplete(mesh: Mesh) -> None:
    own = Trained(mesh, overlap=False)
    own.optimizer.overlap_forward([own.model.embedding, own.model.second])


def test_a_parameter_that_no_module_has_is_an_error() -> None:
    with pytest.raises(RankError, match="first.0.weight, first.2.bias, first.2.weight belong to "):
        on_ranks(incomplete, dp=2)


def compiled(mesh: Mesh) -> list[str]:
    """A module whose call is a program has no place for a hook."""
    log = Log()
    with mock.patch.object(parameter_gather, "gather_pieces", log.gather):
        own = Trained(mesh)
        own.model.second.compile(backend="eager")
        own.optimizer.publish()
        own.optimizer.wait_for_parameters()
    return log.events


def test_what_a_program_reads_is_waited_for_at_once() -> None:
    for found in on_ranks(compiled, dp=2):
        assert found == [*(f"start {i}" for i in range(6)), "land 5", *(
            f"land {i}" for i in range(5)
        )]  # fmt: skip


@pytest.mark.parametrize(("dp", "stage"), [(1, 1), (2, 0)])
def test_where_nothing_travels_there_are_no_hooks(dp: int, stage: int) -> None:
    assert on_ranks(hooks, stage, dp=dp) == [0] * dp


def hooks(mesh: Mesh, stage: int) -> int:
    model = Tied(torch.float32)
    grads = GradAccumulator(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)
    optimizer = SlicedOptimizer(grads, _adamw, parameter_groups(grads.names, 0.1), stage)
    optimizer.overlap_forward(model.children())
    optimizer.publish()
    return sum(len(module._forward_pre_hooks) for module in model.modules())


def ordered_otherwise(mesh: Mesh) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    grads = GradAccumulator(
        named_parameters(model), parameter_layouts(model, mesh.sizes), mesh, bucket_mb=1e-6
    )
    optimizer = SlicedOptimizer(grads, torch.optim.SGD, decay_groups(grads.names, 0.0))
    modules = list(model) if mesh.rank == 0 else list(model)[::-1]
    with pytest.raises(ValueError) as error:
        optimizer.overlap_forward(modules)
    return str(error.value)


def test_modules_in_another_order_on_another_rank_are_refused() -> None:
    for said in on_ranks(ordered_otherwise, dp=2):
        assert "ranks 0 and 1 of the same dp_cp" in said and "in the same order" in said


def copied(mesh: Mesh) -> tuple[bool, list[float], list[float], list[int], float]:
    """Copy a model whose parameters are in flight; then train on, which leaves the copy alone."""
    with mock.patch("kenotron_dist.proof.fake_work._DELAY", 0.1):
        own = Trained(mesh)
        own.step(0)
        in_flight = any(p.isnan().any() for p in own.parameters())
        twin = copy.deepcopy(own.model)
        hooks = [len(module._forward_pre_hooks) for module in own.model.children()]
        loss = twin(torch.arange(7)).item()
        hooks += [len(module._forward_pre_hooks) for module in twin.modules()]
        difference = abs(own.model(torch.arange(7)).item() - loss)
        hooks += [len(module._forward_pre_hooks) for module in own.model.modules()]
        before = [p.tolist() for p in own.parameters()]
        own.step(1)
        return in_flight, before, [p.tolist() for p in twin.parameters()], hooks[4:], difference


def test_a_copy_of_a_model_in_flight_is_complete() -> None:
    """Of parameters that a module has itself, and that its layers have; hooks then go."""
    for in_flight, want, got, hooks, difference in on_ranks(copied, dp=2, backend="fake_nccl"):
        assert in_flight  # else this shows nothing
        assert got == want and not any(hooks) and difference == 0.0
