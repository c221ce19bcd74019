"""Gradients that placements call partial are completed, each in one all-reduce a group."""

import pytest
import torch
from torch import nn

from kenotron_dist import Chunk, Mesh, Partial, Shard, clip_gradients, spawn, sum_gradients


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
    words = f"max_norm {max_norm} and norm_type {norm_type} must be above 0"
    with pytest.raises(ValueError, match=words):
        clip_gradients(nn.Linear(1, 1), Mesh.connect(), max_norm, norm_type)


def test_without_gradients_the_norm_is_zero():
    assert clip_gradients(nn.Linear(1, 1), Mesh.connect(), 1.0) == 0
