"""Frozen matrices with ZeRO stage 3: a rank keeps slices, and the numbers are those of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron_dist import Mesh, RankError
from kenotron_dist.placement import Tie, named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GradAccumulator, SlicedOptimizer, ZeroOptimizer, decay_groups

WIDTH, WORDS, ROWS, STEPS, MICROS = 10, 7, 12, 3, 2


class Adapted(nn.Module):
    """A frozen block with, or without, matrices of rank 2 that learn next to it."""

    def __init__(self, learns: bool, again: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        if learns:
            self.a = nn.Parameter(torch.randn(2, WIDTH))
            self.b = nn.Parameter(torch.zeros(3 * WIDTH, 2))
        self.learns, self.again = learns, again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.again else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        wide = self.up(y) + y @ self.a.t() @ self.b.t() if self.learns else self.up(y)
        return x + self.down(torch.tanh(wide))


class LateHead(nn.Module):
    """Hands on what it is given: the loss reads its weight."""

    def __init__(self, table: nn.Embedding, tied: bool) -> None:
        super().__init__()
        first = table.weight.detach() if tied else torch.randn(WORDS, WIDTH)
        self.weight = nn.Parameter(first, requires_grad=False)
        if tied:
            self.placements = {"weight": Tie("table.weight")}

    def forward(self, x: Tensor) -> Tensor:
        return x


class Net(nn.Module):
    """Four blocks, two with adapters, between a frozen table and a frozen head."""

    def __init__(self, *, tied: bool = False, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.table.weight.requires_grad_(False)
        self.layers = nn.ModuleList(Adapted(i % 2 == 1, again) for i in range(4))
        self.head = LateHead(self.table, tied)
        if tied:
            self.head.weight.data = self.table.weight.data

    @property
    def units(self) -> list[nn.Module]:
        return [self.table, *self.layers, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x) @ self.head.weight.t(), tokens)


def batch(step: int) -> Tensor:
    return torch.randint(WORDS, (ROWS,), generator=torch.Generator().manual_seed(step))


def plain(**how: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and last parameters of torch alone."""
    model, losses = Net(**how), []
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=0.01, weight_decay=0.1, foreach=False)
    for step in range(STEPS):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in named_parameters(model).items()}


def frozen_bytes(model: nn.Module) -> int:
    held = {p.untyped_storage()._cdata: p for p in model.parameters() if not p.requires_grad}
    return sum(p.untyped_storage().nbytes() for p in held.values() if p.ndim > 1)


def trained(
    mesh: Mesh, shard_ranks: int | None, regather: str, how: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], list[int], int]:
    """Losses, last parameters, bytes of whole matrices after backwards, and of slices."""
    model, losses, alive = Net(**how), [], []
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(
        named_parameters(model), layouts, mesh, reduce="micro_batch", shard_ranks=shard_ranks
    )
    groups = decay_groups(grads.names, 0.1, exclude=())
    make = lambda g: torch.optim.AdamW(g, foreach=False)  # noqa: E731
    optimizer = SlicedOptimizer(grads, make, groups, 3, regather=regather)
    optimizer.overlap_forward(model.units)
    data, alive = mesh["dp"], [frozen_bytes(model)]
    for step in range(STEPS):
        grads.start(backwards=MICROS)
        total = 0.0
        for rows in batch(step).chunk(data.size)[data.rank].chunk(MICROS):
            loss = model(rows) * len(rows) / ROWS
            loss.backward()
            total += loss.item()
            alive.append(frozen_bytes(model))
        optimizer.step(grads.finish(), 0.01)
        losses.append(total)
    with torch.no_grad():
        model(batch(0))  # an evaluation gathers, too
    slices = optimizer.parameter_slices()
    held = sum(x.nbytes for name, (x, _) in slices.items() if not name.endswith((".a", ".b")))
    optimizer.wait_for_parameters()
    return losses, {n: p.detach().clone() for n, p in named_parameters(model).items()}, alive, held


CASES = {
    "3 ranks": ({"dp": 3}, None, "layer", {}),
    "tied": ({"dp": 2}, None, "layer", {"tied": True}),
    "computed again": ({"dp": 2}, None, "layer", {"again": True}),
    "by step": ({"dp": 2}, None, "step", {}),
    "blocks": ({"dp": 4}, 2, "layer", {"tied": True, "again": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_frozen_matrices_are_gathered_where_they_are_used(case: str) -> None:
    axes, shard_ranks, regather, how = CASES[case]
    losses, due = plain(**how)
    ranks = on_ranks(trained, shard_ranks, regather, how, **axes)
    assert [sum(own) for own in zip(*(r[0] for r in ranks), strict=True)] == pytest.approx(
        losses, rel=1e-6
    )
    whole = frozen_bytes(Net(**how))
    for _, found, alive, held in ranks:
        for name, expected in due.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
            if not name.endswith((".a", ".b")):
                assert (found[name] == expected).all(), name
        assert alive[0] == 0
        if regather == "layer":  # after each backward nothing is whole
            assert {*alive} == {0}
        share = shard_ranks or axes["dp"]
        assert whole / share * 0.9 < held < whole / share * 1.1


def misused(mesh: Mesh) -> list[str]:
    """What is said of a frozen matrix without memory, and of one that is a part of another."""
    model, said = Net(), []
    optimizer = ZeroOptimizer(model, mesh, stage=3, units=model.units)
    try:
        model.layers[0].state_dict()
    except RuntimeError as error:
        said.append(str(error))
    optimizer.wait_for_parameters()
    with torch.no_grad():
        model.layers[0].up.weight.fill_(0.5)
    optimizer.sliced.reload()
    optimizer.wait_for_parameters()
    assert (model.layers[0].up.weight == 0.5).all()
    other = Net()
    room = torch.zeros(2 * WORDS * WIDTH)
    other.table.weight.data = room[: WORDS * WIDTH].view(WORDS, WIDTH)
    try:
        ZeroOptimizer(other, mesh, stage=3, units=other.units)
    except ValueError as error:
        said.append(str(error))
    return said


def test_frozen_matrices_without_memory_are_named() -> None:
    (hollow, part), _ = on_ranks(misused, dp=2)
    assert "parameter 'layers.0.down.weight' has no memory; call wait_for_parameters()" in hollow
    assert "parameter 'table.weight' is a part of a larger memory" in part


def rewritten(mesh: Mesh, stage: int) -> Tensor:
    """Adapters that begin as a function of the frozen matrix next to them."""
    model = Net()
    optimizer = ZeroOptimizer(model, mesh, stage=stage, units=model.units)
    seen = []
    if stage < 3:
        with pytest.raises(RuntimeError, match="call overlap_forward before, which names"):
            optimizer.sliced.rewrite(print)
        optimizer.sliced.overlap_forward(model.units)

    def write(layer: nn.Module) -> None:
        seen.append(frozen_bytes(model))
        if isinstance(layer, Adapted) and layer.learns:
            layer.b.copy_(layer.up.weight.norm(dim=1, keepdim=True).expand(-1, 2))

    optimizer.sliced.rewrite(write)
    if stage == 3:
        assert max(seen) < frozen_bytes(Net()) / 3 and frozen_bytes(model) == 0
    optimizer.wait_for_parameters()
    return torch.stack([model.layers[i].b.detach().clone() for i in (1, 3)])


@pytest.mark.parametrize("stage", [1, 3])
def test_first_values_may_depend_on_frozen_matrices(stage: int) -> None:
    model = Net()
    due = [model.layers[i].up.weight.norm(dim=1, keepdim=True).expand(-1, 2) for i in (1, 3)]
    for found in on_ranks(rewritten, stage, dp=2):
        assert (found == torch.stack(due)).all()


def apart(mesh: Mesh) -> None:
    model = Net()
    if mesh["dp"].rank:
        model.table.weight.requires_grad_(True)
    ZeroOptimizer(model, mesh, stage=3, units=model.units)


def test_ranks_that_freeze_others_are_named() -> None:
    with pytest.raises(RankError, match="freeze the same ones"):
        on_ranks(apart, dp=2)
