"""Bad input is named with its value, the rule and what to do."""

import pytest
import torch

from kenotron_dist import Axis
from kenotron_ep import combine, dispatch, mix_experts, plan_exchange

SOLO = Axis.solo("ep")
TWO = Axis("ep", 0, (0, 1))  # nothing is sent: the errors come first


def planned(chosen=((0, 1), (1, 2)), experts=4, axis=SOLO, dtype=torch.int64, **options):
    return plan_exchange(torch.tensor(chosen, dtype=dtype), experts, axis, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 3, "axis": TWO}, "3 experts on 2 ep ranks: each rank has equally many.*chan"),
        ({"experts": 0}, "0 experts on 1 ep ranks: each rank has equally many, at least one"),
        ({"chosen": ((0, 4),)}, "expert 4 of 4: choices are from 0 to 3, or -1 for one that is"),
        ({"chosen": ((0, -2),)}, "expert -2 of 4: choices are from 0 to 3"),
        ({"chosen": (0, 1)}, r"experts are \(2,\) of torch.int64: give \(T, K\) of torch.int64"),
        ({"chosen": ((), ())}, r"experts are \(2, 0\) of torch.int64: .* one choice or more"),
        ({"dtype": torch.int32}, r"experts are \(2, 2\) of torch.int32: give \(T, K\) of torch.in"),
        ({"way": "star"}, "way 'star' is not alltoall, once_per_rank or allgather"),
        ({"pad_to": 0}, "pad_to is 0, it must be at least 1"),
        ({"pad_to": 1}, "expert 1 has 2 rows and pad_to is 1: give at least 2, or drop choices"),
        (
            {"by_source": True, "way": "allgather"},
            "by_source was given with way 'allgather' and pad_to None: .*need the way alltoall",
        ),
        ({"by_source": True, "pad_to": 4}, "by_source was given with way 'alltoall' and pad_to 4"),
    ],
)
def test_a_plan_that_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^plan_exchange: {message}"):
        planned(**changes)
    chosen = torch.tensor(
        changes.get("chosen", ((0, 1), (1, 2))), dtype=changes.get("dtype", torch.int64)
    )
    own = {key: changes[key] for key in ("way", "pad_to", "by_source") if key in changes}
    grid = changes.get("experts", 4), changes.get("axis", SOLO)
    x, weights = torch.ones(len(chosen), 2), torch.ones(len(chosen), 2)
    with pytest.raises(ValueError, match=f"^mix_experts: {message}"):  # what the user called
        mix_experts(x, chosen, weights, *grid, lambda rows, _: rows, **own)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(3, 2), r"x is \(3, 2\) of torch.float32: .*with the 2 tokens of the plan"),
        (torch.ones(2), r"x is \(2,\) of torch.float32: give \(T, D\) of a floating dtype"),
        (torch.ones(2, 2).int(), r"x is \(2, 2\) of torch.int32: give \(T, D\) of a floating"),
    ],
)
def test_tokens_that_do_not_fit_the_plan_are_named(x, message):
    with pytest.raises(ValueError, match=f"^dispatch: {message}"):
        dispatch(x, planned())


@pytest.mark.parametrize(
    ("y", "weights", "message"),
    [
        (torch.ones(3, 2), torch.ones(2, 2), r"results are \(3, 2\) of torch.float32: .*the 4 row"),
        (torch.ones(4), torch.ones(2, 2), r"results are \(4,\) of torch.float32: give \(R, D\)"),
        (torch.ones(4, 2).int(), torch.ones(2, 2), r"results are \(4, 2\) of torch.int32: give"),
        (torch.ones(4, 2), torch.ones(4), r"weights are \(4,\) of torch.float32: give \(2, 2\)"),
        (torch.ones(4, 2), torch.ones(2, 2).int(), r"weights are \(2, 2\) of torch.int32: give"),
    ],
)
def test_results_that_do_not_fit_the_plan_are_named(y, weights, message):
    with pytest.raises(ValueError, match=f"^combine: {message}"):
        combine(y, planned(), weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": 0}, "chunks is 0, it must be at least 1"),
        ({"tokens": 3}, "3 tokens, experts of 2 and weights of 2: give one row each for every"),
        (
            {"compute": lambda rows, counts: rows[1:]},
            r"compute returned \(1, 5\) for 2 rows: it must return \(R, D\), one result for each",
        ),
        ({"compute": lambda rows, counts: rows[:, 0]}, r"compute returned \(2,\) for 2 rows"),
    ],
)
def test_a_mixture_that_does_not_fit_is_named(changes, message):
    given = {"tokens": 2, "compute": lambda rows, counts: rows, "chunks": 1} | changes
    x, chosen = torch.ones(given.pop("tokens"), 5), torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match=f"^mix_experts: {message}"):
        mix_experts(x, chosen, torch.ones(2, 1), 2, SOLO, **given)
