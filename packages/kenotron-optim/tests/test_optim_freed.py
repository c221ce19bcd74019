"""What is deleted is freed: no hook keeps an accumulator, its buffers or parameters alive."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_dist.weight_products import taker_of
from kenotron_optim import GradAccumulator, SlicedOptimizer, parameter_groups, partition


def adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0)


def alive(mesh: Mesh, kept: str) -> list[str]:
    """Which things still exist after a step, once all but the one ``kept`` are deleted."""
    things = {"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))}
    model = things["model"]
    layouts = parameter_layouts(model, mesh.sizes)
    things["accumulator"] = grads = GradAccumulator(named_parameters(model), layouts, mesh)
    with mock.patch.object(partition, "PRODUCT_ROWS", 1):
        assert grads.take_products(["1.weight"], anywhere=True)
    groups = parameter_groups(grads.names, 0.1)
    things["optimizer"] = optimizer = SlicedOptimizer(grads, adamw, groups)
    optimizer.overlap_forward(model)
    grads.start(1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step(grads.finish(), lr=0.1)  # parameters are in flight
    watched = {name: weakref.ref(thing) for name, thing in things.items()}
    watched |= {f"parameter {name}": weakref.ref(p) for name, p in model.named_parameters()}
    watched |= {f"buffer {i}": weakref.ref(x) for i, x in enumerate(grads.buffers)}
    if kept == "model":
        model(torch.ones(2, 4))  # nothing is in flight
    stays = things.get(kept)
    del things, model, grads, optimizer
    gc.collect()
    found = [name for name, thing in watched.items() if thing() is not None]
    if isinstance(stays, nn.Module):
        assert taker_of(stays[1].weight) is None
        assert not any(p._post_accumulate_grad_hooks for p in stays.parameters())
        stays(torch.ones(2, 4)).sum().backward()
        assert all(p.grad is not None for p in stays.parameters())
    return found


@pytest.mark.parametrize("dp", [1, 2])
def test_all_is_freed(dp: int) -> None:
    assert on_ranks(alive, "", dp=dp) == [[]] * dp


@pytest.mark.parametrize("dp", [1, 2])
def test_a_model_that_stays_has_its_gradients_again(dp: int) -> None:
    own = [f"parameter {name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
    assert on_ranks(alive, "model", dp=dp) == [["model", *own]] * dp
