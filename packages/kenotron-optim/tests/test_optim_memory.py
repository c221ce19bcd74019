"""What is kept between steps and at their peak: the arithmetic of ZeRO, byte by byte."""

import gc

import pytest
import torch
from torch import nn

from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GlobalNorm, GradAccumulator, SlicedOptimizer, clip_, decay_groups

MB = 2**20
SIZES = (700, 513, 256, 999)  # 1.4 M parameters, no size divides


def held():
    """Bytes of all tensors that are alive."""
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def used(mesh, stage, dtype):
    """Bytes of a model and everything that updates it, after a step; parameters of the model."""
    before = held()
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(SIZES, SIZES[1:], strict=False)])
    model = model.to(dtype)
    layouts = parameter_layouts(model, mesh.sizes)
    grads = GradAccumulator(named_parameters(model), layouts, mesh, bucket_mb=0.5)
    groups = decay_groups(grads.names, 0.1)
    optimizer = SlicedOptimizer(grads, lambda g: torch.optim.AdamW(g, foreach=False), groups, stage)
    for _ in range(2):
        grads.start(backwards=1)
        model(torch.ones(2, SIZES[0], dtype=dtype)).float().sum().backward()
        slices = grads.finish()
        clip_(slices, 1.0, GlobalNorm(grads)(slices))
        optimizer.step(slices, 0.1)
    del slices
    gc.collect()
    rooms = sum(room.nbytes for room in grads._reduction._rooms)
    return held() - before - rooms, rooms, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.by_turns(4)
def test_memory_is_the_arithmetic(stage, dtype, dp):
    for found, rooms, n in on_ranks(used, stage, dtype, dp=dp):
        masters = 0 if dtype == torch.float32 else 4  # an fp32 parameter is its own
        share = dp if stage else 1
        expected = n * (dtype.itemsize + 4 + (masters + 8) / share)
        assert found == pytest.approx(expected, rel=0.02)
        largest = 4 * max(a * b for a, b in zip(SIZES, SIZES[1:], strict=False))
        assert rooms <= 2 * largest * (dp - 1) / dp * 1.02
