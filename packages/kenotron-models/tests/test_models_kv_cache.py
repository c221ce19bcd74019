"""Attention over kept keys and values: the rows of a group of query heads."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from kenotron_cp import Scoring
from kenotron_models.attention_backends import attend_kept
from kenotron_models.kv_cache import KVCache

B, H, K, USED = 3, 8, 16, 11


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("equal_lengths", [False, True])
def test_it_is_that_of_repeated_keys(equal_lengths: bool, kv_heads: int, new: int) -> None:
    torch.manual_seed(0)
    cache = KVCache(16)
    cache.begin(USED, equal_lengths=True)
    k, v = torch.randn(2, B, USED, kv_heads, K).unbind()
    cache.extend(0, k, v, torch.arange(USED).expand(B, -1))
    places = torch.arange(USED - new, USED).expand(B, -1) - (
        0 if equal_lengths else torch.arange(B)[:, None]
    )
    cache.begin(USED, equal_lengths=equal_lengths)
    mask, q = cache.seen(places, None), torch.randn(B, new, H, K)
    keys, values = (x.transpose(1, 2).repeat_interleave(H // kv_heads, 1) for x in (k, v))
    scores = q.transpose(1, 2) @ keys.transpose(-1, -2) * 0.3
    hidden = torch.arange(USED) > places[:, None, :, None]
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    out = attend_kept(q, *cache.kept(0), mask, Scoring(0.3))
    torch.testing.assert_close(out, want.transpose(1, 2))


def test_one_new_token_reads_keys_once() -> None:
    """Query heads of one kv head are rows: no repeated copy of what is kept is made."""
    cache, shapes = KVCache(16), []
    cache.begin(USED, equal_lengths=True)
    k, v = torch.randn(2, B, USED, 2, K).unbind()
    cache.extend(0, k, v, torch.arange(USED).expand(B, -1))
    real = F.scaled_dot_product_attention

    def attend(q, keys, *rest, **options):
        shapes.append((tuple(q.shape), tuple(keys.shape), options.get("enable_gqa", False)))
        return real(q, keys, *rest, **options)

    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        out = attend_kept(torch.randn(B, 1, H, K), *cache.kept(0), None, Scoring(0.3))
    assert out.shape == (B, 1, H, K)
    assert shapes == [((B, 2, H // 2, K), (B, 2, USED, K), False)]
