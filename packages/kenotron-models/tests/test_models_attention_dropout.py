"""Dropout of attention's probabilities: which, how many, and the same for every split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import inputs, sight_of
from torch import Tensor

from kenotron_cp import Dropout, Scoring
from kenotron_dist import Axis
from kenotron_dist.rng import counter_key, uniform
from kenotron_models import Build, Context
from kenotron_models.attention_backends import attend
from kenotron_models.attention_reference import dropout_of
from kenotron_models.layers import Attention, AttentionSpec

HERE = Build(Axis.solo("tp"), device="cpu")
SPEC = AttentionSpec(heads=4, kv_heads=2, head_dim=6, dropout=0.25)
SAMPLES = torch.tensor([4, 40, 400, 1 << 40])


def dropout(step: int = 0, layer: int = 0, first_head: int = 0, p: float = 0.25) -> Dropout:
    context = Context(torch.arange(40).expand(4, 40), SAMPLES, counter_key(0, step))
    found = dropout_of(context, p, layer, first_head)
    assert found is not None
    return found


def keep(drop: Dropout, head: int) -> Tensor:
    """Bool (B, S, S): what is kept of a head, by its number among those held here."""
    return drop.kept(4, range(head, head + 1), torch.arange(40), torch.arange(40))[:, 0]


def test_its_share_is_right_everywhere() -> None:
    kept = torch.stack([keep(dropout(), head) for head in range(4)])  # (H, B, S, S)
    assert abs(kept.float().mean() - 0.75) < 0.01
    for dims in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        shares = kept.float().mean(dims)
        error = (0.25 * 0.75 * shares.numel() / kept.numel()) ** 0.5
        assert (shares - 0.75).abs().max() < 5 * error


def test_it_depends_on_step_layer_head_sample_and_places() -> None:
    base = keep(dropout(), 0)
    assert torch.equal(base, keep(dropout(), 0))
    for other in (dropout(step=1), dropout(layer=1), dropout(first_head=1)):
        assert (keep(other, 0) != base).float().mean() > 0.3
    assert torch.equal(keep(dropout(first_head=1), 0), keep(dropout(), 1))
    for a, b in ((base[0], base[1]), (base[0, 1], base[0, 2]), (base[0], base[0].T)):
        assert (a != b).float().mean() > 0.2


def test_probabilities_are_dropped_and_the_others_grow() -> None:
    q, k, v = inputs(4, 9, 4, 2)
    sight = sight_of(torch.arange(9).expand(4, 9), window=5)
    drop = dropout(first_head=8)
    out = attend(q, k, v, sight, Scoring(0.3, dropout=drop), "sdpa")
    key = counter_key(counter_key(0, 0), "attention", 0)
    for b, head, i in ((0, 0, 8), (1, 3, 4), (3, 2, 0)):
        keys = torch.arange(max(i - 4, 0), i + 1)
        shares = (0.3 * k[b, keys, head // 2] @ q[b, i, head]).softmax(-1)
        at = [torch.full_like(keys, n) for n in (int(SAMPLES[b]), 8 + head, i)]
        kept = uniform(key, *at, keys) >= 0.25
        want = (shares * kept / 0.75) @ v[b, keys, head // 2]
        torch.testing.assert_close(out[b, i, head], want, rtol=1e-5, atol=1e-6)


def run(layer: Attention, x: Tensor, rows: slice, key: int | None = 11) -> Tensor:
    context = Context(torch.arange(10).expand(4, 10)[rows], SAMPLES[rows], key)
    return layer(x.view(4, 10, -1)[rows].flatten(0, 1), context).view(-1, 10, 12)


def test_a_split_into_micro_batches_changes_nothing() -> None:
    layer, x = Attention(SPEC, 12, HERE, layer=1), torch.randn(40, 12)
    whole = run(layer, x, slice(None))
    split = torch.cat([run(layer, x, slice(0, 1)), run(layer, x, slice(1, 4))])
    torch.testing.assert_close(split, whole)
    assert not torch.allclose(run(layer, x, slice(None), key=12), whole)
    nothing = Attention(replace(SPEC, dropout=0.0), 12, HERE, layer=1)
    nothing.load_state_dict(layer.state_dict())
    torch.testing.assert_close(run(layer, x, slice(None), key=None), run(nothing, x, slice(None)))


def test_samples_are_needed() -> None:
    with pytest.raises(ValueError, match=r"0\.25: the context has a dropout_key and no samples_B"):
        dropout_of(Context(torch.zeros(1, 2).long(), dropout_key=3), 0.25, 0, 0)
