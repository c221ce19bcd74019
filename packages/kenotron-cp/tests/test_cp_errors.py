"""Bad input is named with its value, the rule and what to do."""

import pytest
import torch
from cp_cases import keep

from kenotron_cp import FLASH_CPU, Dropout, Layout, Scoring, Visibility, attend
from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks

SOLO = Axis.solo("cp")


def shaped(q=(1, 8, 4, 6), k=(1, 8, 2, 6), v=(1, 8, 2, 6), axis=SOLO, sight=None, **options):
    return attend(*map(torch.zeros, (q, k, v)), axis, sight or Visibility(8), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (8, 4, 6)}, r"q \(8, 4, 6\).*all must be \(B, n, heads, features\)"),
        ({"k": (1, 7, 2, 6)}, r"k \(1, 7, 2, 6\).*they must be"),
        ({"v": (1, 8, 4, 6)}, r"v \(1, 8, 4, 6\).*they must be"),
        ({"q": (1, 8, 4, 5)}, r"q \(1, 8, 4, 5\).*they must be"),
        (
            {"q": (1, 4, 8, 6), "k": (1, 2, 8, 6), "v": (1, 2, 8, 6)},
            r"q \(1, 4, 8, 6\), .* look like torch's \(B, heads, n, features\), .* 8 tokens: give",
        ),
        ({"q": (1, 8, 5, 6)}, "5 query heads and 2 key heads: each key head must serve equally"),
        ({"sight": Visibility(9)}, "8 tokens; a sequence of 9 on 1 cp ranks has 9 a rank: cut it"),
        (
            {"sight": Visibility(8, documents=torch.zeros(3, 8, dtype=torch.int64))},
            "documents of 3 rows and q has 1 rows: give one row",
        ),
        ({"way": "star"}, "way 'star' is not ring, gather or ulysses"),
        (
            {"scoring": Scoring(1.0, 1.0), "kernel": FLASH_CPU},
            "kernel flash_cpu has no cap: leave out kernel, or give PLAIN",
        ),
        (
            {"scoring": Scoring(1.0, sinks=torch.zeros(2))},
            r"sinks \(2,\) for 4 query heads: give one each",
        ),
        ({"stride": 0}, "stride is 0, it must be at least 1"),
        ({"copies": 3}, "copies is 3; it must be a power of two that divides the 2 query heads"),
        (
            {"scoring": Scoring(1.0, 1.0, dropout=Dropout(0.1, keep)), "kernel": FLASH_CPU},
            "kernel flash_cpu has no cap and no dropout: leave out kernel, or give PLAIN",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        shaped(**changes)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"cap": 0.0}, "Scoring: cap is 0.0, it must be a finite number above 0"),
        ({"cap": float("inf")}, "Scoring: cap is inf, it must be a finite number above 0"),
        ({"dropout": Dropout(1.0, keep)}, r"dropout p is 1.0, it must be within \[0, 1\)"),
    ],
)
def test_a_scoring_that_is_none(field, message):
    with pytest.raises(ValueError, match=message):
        Scoring(1.0, **field)


def test_one_floating_dtype():
    q = torch.zeros(1, 8, 2, 4)
    with pytest.raises(ValueError, match=r"torch.float32, torch.float64, .*one floating dtype"):
        attend(q, q.double(), q, SOLO, Visibility(8))
    with pytest.raises(ValueError, match=r"torch.int32, .*one floating dtype"):
        attend(q.int(), q.int(), q.int(), SOLO, Visibility(8))


def of_heads(mesh):
    axis = mesh["cp"]

    def message(heads, kv_heads, **options):
        q, k = torch.zeros(1, 16, heads, 4), torch.zeros(1, 16, kv_heads, 4)
        with pytest.raises(ValueError) as error:
            attend(q, k, k, axis, Visibility(32), way="ulysses", **options)
        return str(error.value)

    return message(3, 3), message(12, 3), message(4, 4, layout=Layout(strips=12))


def test_heads_that_ulysses_cannot_divide():
    query, key, strips = on_ranks(of_heads, cp=2)[0]
    assert query.startswith("ulysses: 3 query heads on 2 cp ranks: the ranks must divide the heads")
    assert key.startswith("ulysses: 3 key heads on 2 cp ranks: one must divide the other; use the")
    assert strips.startswith("Layout: 12 strips do not fit 2 ranks: with the order zigzag strips")
