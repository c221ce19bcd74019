"""Latent attention: its formula, and the gradients of one process on every layout."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from decoder_gradients import LATENT, complete, gradients
from torch import Tensor
from torch.nn import functional as F

from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks
from kenotron_models import Build, Context
from kenotron_models.latent_attention import LatentAttention
from kenotron_models.layers import rotary_angles, rotate


def test_it_is_attention_with_keys_and_values_of_a_latent() -> None:
    torch.manual_seed(0)
    layer = LatentAttention(LATENT, 24, Build(Axis.solo("tp"), device=None))
    x, places = torch.randn(9, 24), torch.arange(9).view(1, 9)
    q = layer.q_b(layer.q_norm(layer.q_a(x))).view(9, 8, 10)
    narrow, shared = layer.kv_a(x).split((12, 4), -1)
    kv = layer.kv_b(layer.kv_norm(narrow)).view(9, 8, 12)
    cos, sin = rotary_angles(places, 4, 10000.0)
    turn = lambda y: rotate(y[None], cos, sin)[0]  # noqa: E731
    q = torch.cat([q[..., :6], turn(q[..., 6:])], -1)
    k = torch.cat([kv[..., :6], turn(shared[:, None]).expand(9, 8, 4)], -1)
    scores = torch.einsum("qhk,shk->hqs", q, k) * 10**-0.5
    hidden = torch.full((9, 9), -torch.inf).triu(1)
    mixed = torch.einsum("hqs,shv->qhv", (scores + hidden).softmax(-1), kv[..., 6:])
    wanted = F.linear(mixed.flatten(1), layer.out.weight)
    torch.testing.assert_close(layer(x, Context(places)), wanted)


@cache
def on_one(name: str) -> tuple[float, dict[str, Tensor]]:
    ranks = on_ranks(gradients, name, "plain")
    return ranks[0][0], complete(ranks)


CASES = [
    ("latent", "plain", "ring", "none", {"tp": 2}),
    ("latent", "sequence", "ring", "selective", {"tp": 4}),
    ("latent", "sequence", "ulysses", "full", {"cp": 2, "tp": 2}),
    ("latent-direct", "plain", "gather", "selective", {"cp": 2}),
    ("latent-direct", "sequence", "ring", "none", {"tp": 2, "cp": 2}),
]


@pytest.mark.parametrize(("name", "mode", "way", "again", "axes"), CASES, ids=str)
def test_every_gradient_is_that_of_one_process(
    name: str, mode: str, way: str, again: str, axes: dict[str, int]
) -> None:
    loss, want = on_one(name)
    ranks = on_ranks(gradients, name, mode, way, again, **axes)
    assert all(rank[0] == pytest.approx(loss, rel=1e-5) for rank in ranks)
    got = complete(ranks)
    assert set(got) == set(want)
    for path, tensor in want.items():
        assert (got[path] - tensor).abs().max() / tensor.abs().max() < 2e-5, path
