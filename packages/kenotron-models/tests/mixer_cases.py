"""Shared by tests of mixers with a state: stacks of one mixer, layouts, texts token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from decoder_gradients import complete, recurrent
from torch import Tensor

from kenotron_dist import Axis, GridView, spawn
from kenotron_dist.init import initialize
from kenotron_dist.placement import parameter_layouts
from kenotron_models import Build, Context, LayerStack, build_decoder, standard_init
from kenotron_models.layers import KVCache, PartSpec

ONE = Build(Axis.solo("tp"))
Gradients = Callable[..., Any]
"""``decoder_gradients.gradients``, or the same in fp64."""


def stack_of(mixer: PartSpec, **changes: object) -> LayerStack:
    """Three blocks of the mixer in fp64, with first values from a seed."""
    spec = recurrent(replace(mixer, **changes))
    stack = LayerStack(build_decoder(spec, replace(ONE, dtype=torch.float64)))
    layouts = parameter_layouts(stack, {"tp": 1})
    stack.to_empty(device="cpu")
    view = GridView.at({"pp": 1, "dp": 1, "cp": 1, "tp": 1}, 0)
    initialize(stack, layouts, lambda _: view, seed=1, initializer=standard_init(spec, 0.4))
    return stack


@cache
def on_one(run: Gradients, name: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    ranks = spawn(run, name, "plain")
    return ranks[0][0], complete(ranks)


def same_as_one(
    run: Gradients, name: str, how: tuple[Any, ...], axes: dict[str, int], bound: float
) -> None:
    """Check loss and every gradient of a layout against one process."""
    loss, want = on_one(run, name)
    ranks = spawn(run, name, *how, **axes)
    assert all(rank[0] == pytest.approx(loss, rel=bound / 10) for rank in ranks)
    got = complete(ranks)
    assert set(got) == set(want)
    for path, tensor in want.items():
        assert (got[path] - tensor).abs().max() / tensor.abs().max() < bound, path


def documents_are_apart(stack: LayerStack) -> None:
    """Check that nothing passes from a document to the one after it."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    x = torch.randn(9, 24, dtype=torch.float64, requires_grad=True)
    y = stack.get_submodule("layers.0")(x, Context(positions))
    y[5:].sum().backward()
    assert x.grad is not None
    assert x.grad[:5].count_nonzero() == 0 and x.grad[5:].count_nonzero() == 4 * 24
    alone = stack.get_submodule("layers.0")(x[5:], Context(positions[:, 5:]))
    torch.testing.assert_close(y[5:], alone, rtol=1e-12, atol=1e-12)


def one_by_one_as_in_parallel(stack: LayerStack, total: int = 512) -> None:
    """Check texts of different lengths that are read at once, then continue token by token."""
    lengths = [3, 1, 7]
    tokens = (torch.arange(3 * total) * 13 % 32).view(3, total)
    with torch.no_grad():
        whole = stack(tokens.flatten(), Context(torch.arange(total).expand(3, -1)))
        whole = whole.view(3, total, -1)
        kept, first = KVCache(total), max(lengths)
        places = torch.arange(first).expand(3, -1)
        padding = places >= torch.tensor(lengths)[:, None]
        kept.begin(first, equal_lengths=False)
        read = torch.where(padding, 31, tokens[:, :first]).flatten()
        stack(read, Context(places, cache=kept, padding_BS=padding))
        for step in range(total - first):
            at = torch.tensor(lengths)[:, None] + step
            kept.begin(first + step + 1, equal_lengths=False)
            got = stack(tokens.gather(1, at).flatten(), Context(at, cache=kept))
            want = whole[torch.arange(3), at[:, 0]]
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
