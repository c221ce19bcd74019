"""The gradient of attention sinks: each rank's queries have their part of it, once."""

from typing import Any

import pytest
import torch
from cp_cases import SINKS, WAYS, Case
from torch.testing import assert_close

from kenotron_cp import FLASH_CPU, PLAIN, Dropout, Scoring, Visibility, attend, cut_sequence
from kenotron_dist import all_reduce
from kenotron_dist.rng import uniform
from kenotron_dist.testing import on_ranks

OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of the scoring, of the attention
    ({}, {}),
    ({"cap": 1.2}, {}),
    ({}, {"kernel": PLAIN}),
    ({}, {"kernel": FLASH_CPU}),
]
CASE = Case(Visibility.of_lengths([20, 31], 13), 8, 4)


def keep(rows, heads, queries, keys):
    return uniform(7, rows[:, None, None, None], heads[:, None, None], queries[:, None], keys) > 0.3


def gradient(mesh, way, fields, options, each=False):
    """Of the sinks, summed over ranks; ``each``: every query is given its own."""
    axis, sinks = mesh["cp"], SINKS.clone().requires_grad_()
    *tensors, grad = (cut_sequence(x, axis) for x in CASE.tensors())
    given = sinks.expand(tensors[0].shape[:3]) if each else sinks
    scoring = Scoring(CASE.depth**-0.5, sinks=given, **fields)
    attend(*tensors, axis, CASE.sight, scoring, way=way, **options).backward(grad)
    return all_reduce(sinks.grad, axis)


def by_the_definition(cap=None):
    q, k, v, grad = (x.double() for x in CASE.tensors())
    sinks, group = SINKS.double().requires_grad_(), CASE.heads // CASE.kv_heads
    keys, values = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    scores = q.transpose(1, 2) @ keys.mT * q.shape[-1] ** -0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    weights = scores.masked_fill(~CASE.sight.dense_mask(), -torch.inf).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + sinks.exp()[:, None, None])
    (weights @ values).transpose(1, 2).backward(grad)
    return sinks.grad


def gradients(mesh):
    """Of all ways and kernels."""
    return {
        (way, i, each): gradient(mesh, way, *how, each)
        for way in WAYS
        for i, how in enumerate(OPTIONS)
        for each in (False, True)
    }


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_it_is_that_of_one_process(cp: int):
    for ranks in on_ranks(gradients, cp=cp):
        for (way, i, _), found in ranks.items():
            want = by_the_definition(OPTIONS[i][0].get("cap"))
            assert_close(found.double(), want, rtol=1e-5, atol=1e-5, msg=f"{way}, {OPTIONS[i]}")


@pytest.mark.parametrize("way", WAYS)
def test_dropped_keys_leave_the_share_of_the_sink(way):
    fields = {"dropout": Dropout(0.3, keep)}
    [want] = on_ranks(gradient, "ring", fields, {})
    for found in on_ranks(gradient, way, fields, {}, cp=2):
        assert_close(found, want, rtol=1e-5, atol=1e-5)
