"""Experts on several ranks compute what one process does, bit by bit."""

from functools import cache

import pytest
import torch
from ep_cases import VARIANTS, Dense, cases, on_this_rank

from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks

NAMES = ("out", "x", "weights", "first", "second")
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float64: 1e-13}


class OneRank(dict):
    """The part of a mesh that the cases use."""


@cache
def alone():
    """Everything on one rank, without processes."""
    pairs = [(name, variant) for name in cases() for variant in VARIANTS]
    return on_this_rank(OneRank(ep=Axis.solo("ep")), pairs)


@cache
def dense(name):
    return Dense(cases()[name]).found


def check_close(ours, right, dtype, *what):
    assert ours.shape == right.shape
    if right.numel():
        error = (ours.double() - right.double()).abs().max() / right.abs().max().clamp(min=1)
        assert error <= TOLERANCES[dtype], (what, float(error))


def has_the_bits(case, what, variant):
    """Whether a result has the bits of one rank and the plain variant."""
    options = VARIANTS[variant]
    if what == "x":
        return options.get("way", "alltoall") == "alltoall" and not case.gated
    if what in ("first", "second"):  # sums over rows, which chunks and padding divide otherwise
        return not {"chunks", "pad_to"} & options.keys() and not case.gated
    return not case.gated


def check_all(found, expected):
    """Compare joined results with one rank's and with the dense ones."""
    for (name, variant), tensors in found.items():
        case = cases()[name]
        for what, ours, right, exact in zip(
            NAMES, tensors, expected[name, "plain"], dense(name), strict=True
        ):
            assert ours.dtype == right.dtype
            if has_the_bits(case, what, variant):
                assert torch.equal(ours, right), (name, variant, what)
            check_close(ours, exact, case.dtype, name, variant, what)


def joined(ranks):
    """Results of all ranks one after the other: tokens, and experts."""
    return {
        key: [torch.cat(parts) for parts in zip(*(rank[key] for rank in ranks), strict=True)]
        for key in ranks[0]
    }


@pytest.mark.smoke
def test_one_rank_is_a_loop_over_experts():
    found = alone()
    check_all(found, found)
    assert len(found) == len(cases()) * len(VARIANTS)


@pytest.mark.parametrize("ep", [2, 4, 8])
@pytest.mark.by_turns(1)
def test_bits_do_not_depend_on_the_number_of_ranks(ep):
    found = joined(on_ranks(on_this_rank, dp=ep, ep=ep))
    assert len(found) == 5 * len(VARIANTS) + 2 * (len(cases()) - 5)
    check_all(found, alone())


def test_bits_are_the_same_where_nothing_waits_by_itself():
    """Over a backend whose results do not exist before they are waited for (fake NCCL)."""
    pairs = [(name, variant) for name in ("dropped", "no token") for variant in VARIANTS]
    check_all(joined(on_ranks(on_this_rank, pairs, dp=4, ep=4, backend="fake_nccl")), alone())


def test_experts_without_tokens_have_zero_gradients():
    found = alone()["experts without tokens", "plain"]
    for grad in found[3:]:
        assert (grad[[0, 2, 3, 4, 5, 7]] == 0).all() and (grad[[1, 6]] != 0).any()


def test_a_dropped_choice_has_no_gradient():
    case = cases()["dropped"]
    dropped = case.tensors()[1] == -1
    weights = alone()["dropped", "plain"][2]
    assert dropped.any() and (weights[dropped] == 0).all() and (weights[~dropped] != 0).all()
