"""``ZeroOptimizer`` trains as torch's optimizer over the whole batch does in one process."""

import copy

import pytest
import torch
from torch import nn

from kenotron_dist import Mesh, RankError
from kenotron_dist.placement import parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GradAccumulator, ZeroOptimizer
from kenotron_optim.zero_optimizer import units_of

ROWS, STEPS = 12, 4


class Net(nn.Module):
    """Two blocks in a list between a table and a head."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (ROWS, 2), generator=generator).unbind(1)


def make():
    torch.manual_seed(0)
    return Net()


def losses(model, optimizer, step, rows, micros=2):
    """One step of a usual loop; the sum of the losses of its micro-batches."""
    ids, labels = (each[rows] for each in batch(step))
    optimizer.zero_grad()
    total = 0.0
    for own, due in zip(ids.chunk(micros), labels.chunk(micros), strict=True):
        loss = nn.functional.cross_entropy(model(own), due) / micros
        loss.backward()
        total += loss.item()
    return total


def plain(max_norm=None):
    """Losses, norms and last parameters of torch alone."""
    model, found, norms = make(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        found.append(losses(model, optimizer, step, slice(None)))
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        schedule.step()
    return found, norms, [p.detach() for p in model.parameters()]


def ours(mesh, cases):
    """The same on data ranks, resumed by another optimizer after the second step."""
    found = []
    n, me = mesh["dp"].size, mesh["dp"].rank
    rows = slice(me * ROWS // n, (me + 1) * ROWS // n)
    for stage, max_norm in cases:
        model, totals, norms = make(), [], []
        options = {"lr": 0.1, "weight_decay": 0.1, "stage": stage, "max_norm": max_norm}
        optimizer = ZeroOptimizer(model, mesh, foreach=False, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(STEPS):
            if step == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                model = make()
                optimizer = ZeroOptimizer(model, mesh, foreach=False, **options | {"lr": 9.0})
                optimizer.load_state_dict(saved)
                assert optimizer.param_groups[0]["lr"] == 0.05
                schedule.optimizer = optimizer
            totals.append(losses(model, optimizer, step, rows))
            optimizer.step()
            schedule.step()
            norms += [] if max_norm is None else [optimizer.grad_norm.item()]
        optimizer.wait_for_parameters()
        found.append((totals, norms, [p.detach().clone() for p in model.parameters()]))
    return found


CASES = [(stage, 0.5) for stage in range(4)] + [(3, None)]


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_a_usual_loop_trains_as_in_one_process(dp):
    ranks = on_ranks(ours, CASES, dp=dp)
    for number, (_, max_norm) in enumerate(CASES):
        totals, norms, parameters = plain(max_norm)
        mean = [sum(rank[number][0][i] for rank in ranks) / dp for i in range(STEPS)]
        assert mean == pytest.approx(totals, rel=2e-6)
        for _, own, ends in (rank[number] for rank in ranks):
            assert own == pytest.approx(norms, rel=2e-6)
            for a, b in zip(ends, parameters, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def summed(mesh):
    """Sums of a loss divided by the global count; by a closure."""
    model, rows = make(), ROWS // mesh["dp"].size
    optimizer = ZeroOptimizer(model, mesh, torch.optim.SGD, lr=0.5, mean=False)
    ids, labels = (each.split(rows)[mesh["dp"].rank] for each in batch(0))

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), labels, reduction="sum") / ROWS
        loss.backward()
        return loss

    loss = optimizer.step(closure).item()
    return loss, model.head.weight.detach()


def test_sums_and_closures():
    (one,), two = on_ranks(summed), on_ranks(summed, dp=2)
    assert sum(loss for loss, _ in two) == pytest.approx(one[0], rel=1e-6)
    for _, weight in two:
        torch.testing.assert_close(weight, one[1])


def differing(mesh):
    torch.manual_seed(mesh.rank)
    ZeroOptimizer(Net(), mesh)


def with_stages(mesh):
    ZeroOptimizer(Net(), mesh)


def test_replicas_that_differ_and_pipelines_are_refused():
    with pytest.raises(
        RankError,
        match=r"must be equal over dp_cp .* differ, first .*: were all ranks given the same seed",
    ):
        on_ranks(differing, dp=2)
    with pytest.raises(RankError, match="the mesh has 2 pipeline stages: a stage's module has no"):
        on_ranks(with_stages, pp=2)


def test_what_cannot_be_meant_is_refused():
    mesh, model = Mesh.connect(), make()
    optimizer = ZeroOptimizer(model, mesh)
    with pytest.raises(ValueError, match=r"cannot clip to a norm of 0: it must be above 0"):
        ZeroOptimizer(make(), mesh, max_norm=0)
    with pytest.raises(ValueError, match="make_optimizer is a AdamW: give what makes one of param"):
        ZeroOptimizer(make(), mesh, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"parameters is a generator: give a mapping by name, ken"):
        GradAccumulator(model.parameters(), parameter_layouts(model, mesh.sizes), mesh)
    with pytest.raises(ValueError, match=r"layouts is a list: .*parameter_layouts\(module, mesh.s"):
        GradAccumulator(dict(model.named_parameters()), [], mesh)
    tied = make()
    tied.head.weight = tied.table.weight
    with pytest.raises(ValueError, match="are one Parameter: give each its own, with the same Tie"):
        ZeroOptimizer(tied, mesh)
    saved = optimizer.state_dict()
    saved["slices"].popitem()
    words = "has shape None, this rank holds .*: a state_dict fits its own model, layout and ZeRO"
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved)


def test_units_are_children_and_those_of_containers():
    model = make()
    assert units_of(model) == [model.table, *model.blocks, model.head]
