"""The order of samples is an exact, keyed, even permutation of any size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_data import inverse_permute, permutation_key, permute

SEEDS = st.integers(0, 2**63)


@settings(max_examples=300, deadline=None)
@given(n=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_every_place_comes_exactly_once(n, seed, epoch):
    places = permute(np.arange(n), n, permutation_key(seed, epoch))
    assert places.dtype == np.int64
    assert np.array_equal(np.sort(places), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9, 10, 65_536, 65_537, 99_999])
def test_awkward_sizes_are_bijective(n):
    places = permute(np.arange(n), n, permutation_key(7, 3))
    assert np.array_equal(np.bincount(places, minlength=n), np.ones(n))


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 10**12), seed=SEEDS, data=st.data())
def test_large_sizes_stay_in_range_and_invert(n, seed, data):
    i = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    key = permutation_key(seed, 0)
    places = permute(i, n, key)
    assert places.min() >= 0
    assert places.max() < n
    assert np.array_equal(inverse_permute(places, n, key), i)
    assert len(set(places.tolist())) == len(set(i.tolist()))


def test_the_largest_size_inverts():
    n, key = 2**62, permutation_key(0, 0)
    i = np.array([0, 1, 2**61, n - 1])
    assert np.array_equal(inverse_permute(permute(i, n, key), n, key), i)


def test_one_index_is_what_the_array_gives():
    key = permutation_key(1, 2)
    whole = permute(np.arange(50), 50, key)
    assert [int(permute(i, 50, key)) for i in range(50)] == whole.tolist()
    assert permute(np.arange(6).reshape(2, 3), 50, key).tolist() == whole[:6].reshape(2, 3).tolist()


def test_the_numbers_are_pinned():
    places = permute(np.arange(12), 12, permutation_key(42, 0))
    assert places.tolist() == [9, 3, 4, 6, 8, 2, 7, 5, 11, 1, 0, 10]
    assert permute(10**11, 10**12, permutation_key(42, 1)) == 376158687629


def test_every_word_of_the_key_counts():
    keys = [
        permutation_key(1, 0),
        permutation_key(0, 1),
        permutation_key(0, 0, 1),
        permutation_key(0, 0, "1"),
        permutation_key(0, 0),
    ]
    orders = {tuple(permute(np.arange(100), 100, key)) for key in keys}
    assert len(orders) == len(keys)


def test_the_type_of_an_integer_does_not_count():
    assert np.array_equal(permutation_key(np.int64(5), 1), permutation_key(5, np.int32(1)))


def test_every_order_of_five_occurs():
    i = np.arange(5)
    orders = {tuple(permute(i, 5, permutation_key(seed, 0)).tolist()) for seed in range(3000)}
    assert len(orders) == 120


def deviation(counts: np.ndarray, freedom: int) -> float:
    """Chi-square against equal counts, in standard deviations from its mean."""
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    return abs(statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("n", [33, 97])
def test_places_neighbours_and_pairs_are_even(n):
    orders = np.stack([permute(np.arange(n), n, permutation_key(s, 1)) for s in range(3000)])
    places = np.stack([np.bincount(column, minlength=n) for column in orders.T])
    assert deviation(places, (n - 1) ** 2) < 4  # its rows and columns have fixed sums
    steps = np.diff(orders, axis=1) % n
    assert deviation(np.bincount(steps.ravel(), minlength=n)[1:], n - 2) < 4
    pairs = np.bincount(orders[:, 0] * n + orders[:, 1], minlength=n * n).reshape(n, n)
    different = pairs[~np.eye(n, dtype=bool)]
    assert deviation(different, different.size - 1) < 4


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1])
def test_a_size_out_of_range_is_named(n):
    with pytest.raises(ValueError, match=f"cannot permute {n} samples: the number must be from 1"):
        permute(0, n, permutation_key(0, 0))


@pytest.mark.parametrize("i", [-1, 10])
def test_an_index_out_of_range_is_named(i):
    with pytest.raises(ValueError, match=rf"from {i} to {i} are not all in \[0, 10\)"):
        permute(i, 10, permutation_key(0, 0))


def test_a_wrong_key_is_named():
    with pytest.raises(ValueError, match=r"the key has shape \(3,\), needed are 8 round keys"):
        permute(0, 10, permutation_key(0, 0)[:3])
