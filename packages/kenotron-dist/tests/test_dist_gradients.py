"""Gradients that placements call partial are completed, each in one all-reduce a group."""

import pytest
import torch
from torch import nn

from kenotron_dist import Mesh, clip_gradients, spawn, sum_gradients
from kenotron_dist.placement import Chunk, Partial, Shard, Tie


class Cut(nn.Module):
    """Two parts of three rows over the ranks, a vector that is partial, one that is whole."""

    def __init__(self, n):
        super().__init__()
        rows = 6 // min(n, 2)
        self.heads = nn.Parameter(torch.zeros(rows, 2))
        self.norm = nn.Parameter(torch.zeros(3))
        self.idle = nn.Parameter(torch.zeros(2))
        self.whole = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.placements = {
            "heads": Shard("tp", 0, (Chunk(6, parts=2),)),
            "norm": Partial("tp"),
            "idle": Partial("tp"),
            "frozen": Partial("tp"),
        }


def complete(mesh):
    n, me = mesh["tp"].size, mesh["tp"].rank
    module = Cut(n)
    for parameter in (module.heads, module.norm, module.whole):
        parameter.grad = torch.full_like(parameter, float(me + 1))
    if me == 0:
        module.idle.grad = torch.ones(2)
    sum_gradients(module, mesh)
    assert module.frozen.grad is None
    return [p.grad for p in (module.heads, module.norm, module.idle, module.whole)]


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_partial_gradients_are_summed(tp, dp):
    for rank, (heads, norm, idle, whole) in enumerate(spawn(complete, tp=tp, dp=dp)):
        me = rank % tp
        shared = {1: 1, 2: me + 1, 4: 3 if me < 2 else 7}[tp]  # two ranks hold a part of two
        assert heads.eq(shared).all()
        assert norm.eq(sum(range(1, tp + 1))).all()
        assert idle.eq(1).all()
        assert whole.eq(me + 1).all()


@pytest.mark.parametrize(("max_norm", "norm_type"), [(0.0, 2.0), (-1.0, 2.0), (1.0, 0.0)])
def test_a_norm_to_clip_to_is_positive(max_norm, norm_type):
    words = "clip_gradients: (max_norm|norm_type) -?[01].0 must be above 0"
    with pytest.raises(ValueError, match=words):
        clip_gradients(nn.Linear(1, 1), Mesh.connect(), max_norm, norm_type)


def test_without_gradients_the_norm_is_zero():
    assert clip_gradients(nn.Linear(1, 1), Mesh.connect(), 1.0) == 0


def clip_stages(mesh):
    """Each pipeline stage has its own layer; an empty parameter belongs to nobody's norm."""
    layer = nn.Linear(2, 2)
    layer.empty = nn.Parameter(torch.empty(0, 3))
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    largest = clip_gradients(layer, mesh, 10.0, float("inf"))
    return clip_gradients(layer, mesh, 1.0), largest, layer.weight.grad


def test_the_norm_is_that_of_all_stages():
    for norm, largest, grad in spawn(clip_stages, pp=2, dp=2):
        torch.testing.assert_close(norm, torch.tensor(12.0, dtype=torch.float64).sqrt())
        assert largest == 1
        torch.testing.assert_close(grad, torch.full((2, 2), 12**-0.5))


def test_tied_parameters_are_left_to_optim():
    layer = nn.Linear(2, 2)
    layer.placements = {"weight": Tie("embedding.weight")}
    with pytest.raises(ValueError, match="parameters weight are tied by placements: kenotron-opt"):
        clip_gradients(layer, Mesh.connect(), 1.0)
