"""What the norm costs does not grow with the ranks: counted on a backend that sends nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_optim import GlobalNorm, GradAccumulator, accumulate

LAYERS = 100
STAGES = 2


class Costs(TorchDispatchMode):
    """Counts operations, and the bytes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        found = [x for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
        self.nbytes += sum(x.nbytes for x in found)
        return out


@contextmanager
def world_of(size: int) -> Iterator[Mesh]:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # checks of torch would need gloo
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield Mesh.connect(pp=STAGES, dp=size // 8, tp=4, device="cpu")
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(level)
        gc.collect()


def costs(size: int, norm_type: float) -> Costs:
    """Of one norm, on rank 0 of ``size``."""
    with world_of(size) as mesh:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])
        layouts = parameter_layouts(model, mesh.sizes)
        nobody_answers = {"check_alike": mock.DEFAULT, "frozen_ties": lambda *_: set()}
        with mock.patch.multiple(accumulate, **nobody_answers):
            grads = GradAccumulator(named_parameters(model), layouts, mesh)
        grads.start()
        slices, norm = grads.finish(), GlobalNorm(grads, norm_type)
        with Costs() as found:
            norm(slices)
        return found


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_kernels_and_traffic_do_not_grow_with_the_ranks(norm_type: float) -> None:
    few, many = costs(16, norm_type), costs(4096, norm_type)
    assert many.operations <= few.operations
    # Each rank sends the power of a tensor; what is made of it is counted again.
    assert many.nbytes <= few.nbytes + 17 * 4096 * 8
