"""A mixture keeps its shares at every prefix, and each source's own order."""

import time
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_data import Loader, Mixture, PackedTokens, RandomTokens
from kenotron_data.mixture import PERIOD, chairman, round_shares


def numbered(n, first=0, s=3):
    """n samples whose first token, divided by s, is first + their index."""
    return PackedTokens(np.arange(first * s, (first + n) * s + 1, dtype=np.int64), s)


def deviation(quanta):
    """Largest |times picked - share of the picks| over sources and prefixes, exactly."""
    picks, period = chairman(quanta), sum(quanta)
    t = np.arange(1, period + 1)
    worst = 0
    for i, q in enumerate(quanta):
        count = np.cumsum(picks == i)
        assert count[-1] == q
        worst = max(worst, int(np.abs(count * period - t * q).max()))
    return worst / period


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-2, 1), min_size=2, max_size=12))
def test_every_prefix_is_within_one_sample_of_the_shares(weights):
    names = [str(i) for i in range(len(weights))]
    quanta = round_shares(dict(zip(names, weights, strict=True)), names)
    assert sum(quanta) == PERIOD
    exact = np.array(weights) / sum(weights) * PERIOD
    assert np.abs(np.array(quanta) - exact).max() < 1
    assert deviation(quanta) <= 1 - 1 / (2 * len(weights) - 2)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any))
def test_short_periods_keep_the_bound_too(quanta):
    read = sum(q > 0 for q in quanta)
    assert deviation(quanta) <= (1 - 1 / (2 * read - 2) if read > 1 else 0)


@pytest.mark.parametrize(
    "quanta", [(65_535, 1), (1,) * 3 + (65_533,), (32_768, 32_768), (32, 65_504)]
)
def test_extreme_shares_keep_the_bound(quanta):
    assert deviation(quanta) <= 1 - 1 / (2 * sum(q > 0 for q in quanta) - 2)


def test_a_thousand_sources_keep_the_bound():
    rng = np.random.default_rng(0)
    quanta = rng.multinomial(PERIOD - 1000, rng.dirichlet(np.ones(1000))) + 1
    assert deviation(quanta.tolist()) < 1


def test_each_source_is_read_in_its_own_order_without_loss():
    sizes = {"a": 7, "b": 30, "c": 11}
    firsts = {"a": 0, "b": 7, "c": 37}
    sources = {name: numbered(n, firsts[name]) for name, n in sizes.items()}
    mixture = Mixture(sources, {"a": 3, "b": 2, "c": 1})
    assert sum(mixture.shares.values()) == 1
    with Loader(mixture, micro_batch_size=6, microbatches=1, prefetch=0) as loader:
        batches = list(islice(loader, 60))
    first = np.concatenate([b.tokens_MBS[0, :, 0].numpy() // 3 for b in batches])
    tags = np.concatenate([b.sources_MB[0].numpy() for b in batches])
    for number, (name, n) in enumerate(sizes.items()):
        seen = first[tags == number] - firsts[name]
        assert abs(len(seen) - 360 * mixture.shares[name]) < 1
        epochs = [seen[i : i + n].tolist() for i in range(0, len(seen) - n + 1, n)]
        assert epochs
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def taken(mixture, name, seed=0, stage=0, count=40):
    indices = mixture.order(np.arange(4000), seed, stage)
    number = mixture.sources.index(name)
    return (indices[mixture.source_of(indices) == number] - mixture.offsets[number])[
        :count
    ].tolist()


def test_the_order_of_a_source_does_not_depend_on_the_others():
    a, b, c = numbered(50), numbered(20), numbered(90)
    one = Mixture({"a": a, "b": b}, {"a": 1, "b": 1})
    two = Mixture({"c": c, "b": b, "a": a}, {"a": 1, "b": 5, "c": 1})
    assert taken(one, "a") == taken(two, "a")
    assert taken(one, "b") == taken(two, "b")
    orders = {
        tuple(taken(one, name, seed, stage)) for name in "ab" for seed in (0, 1) for stage in (0, 1)
    }
    assert len(orders) == 8


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**12))
def test_any_place_is_located_alone(i):
    mixture = Mixture({"a": numbered(9), "b": numbered(4)}, {"a": 0.3, "b": 0.7})
    source, count = mixture.locate(np.array([i, i + 1]))
    for number, q in enumerate(mixture.quanta):
        if source[0] == number:
            assert abs(count[0] - i * q / PERIOD) <= 1
    assert count[1] == count[0] + 1 or source[1] != source[0]
    window = mixture.order(np.arange(i, i + 50), 3, 1)
    assert window[7] == mixture.order(np.array([i + 7]), 3, 1)[0]


def test_a_period_is_followed_by_the_next_without_a_gap():
    mixture = Mixture({"a": numbered(9), "b": numbered(4)}, {"a": 1, "b": 2})
    source, count = mixture.locate(np.arange(2 * PERIOD + 5))
    for number in (0, 1):
        assert count[source == number].tolist() == list(range((source == number).sum()))


def test_a_place_far_away_costs_less_than_a_millisecond():
    sources = {name: RandomTokens(100, 8, seed=i, samples=10**12) for i, name in enumerate("abc")}
    mixture = Mixture(sources, {"a": 1, "b": 2, "c": 3})
    places = np.arange(10**12, 10**12 + 8)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        mixture.order(places, 1, 0)
        times.append(time.perf_counter() - begin)
    assert min(times) < 2e-3  # three sources; one alone is tested with the loader


def test_without_weights_shares_follow_the_sizes_and_zero_is_never_read():
    a, b = numbered(30), numbered(10)
    assert Mixture({"a": a, "b": b}).shares == {"a": 0.75, "b": 0.25}
    zero = Mixture({"a": a, "b": b}, {"a": 0, "b": 1})
    assert zero.shares == {"a": 0, "b": 1}
    assert taken(zero, "a") == []


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"a": 1}, r"weights are given for \['a'\], but the sources are \['a', 'b'\]"),
        ({"a": 1, "b": 1, "c": 1}, "but the sources are"),
        ({"a": 1, "b": -1}, "weight of source 'b' must be a finite number of 0 or more, but -1"),
        ({"a": float("nan"), "b": 1}, "weight of source 'a' must be a finite number"),
        ({"a": 0, "b": 0}, "the weights add up to 0"),
        ({"a": 1, "b": 1e-6}, "weight 1e-06 of source 'b' is a share of 1e-06, too little"),
    ],
)
def test_wrong_weights_are_named(weights, sentence):
    with pytest.raises(ValueError, match=sentence):
        Mixture({"a": numbered(3), "b": numbered(3)}, weights)


def test_wrong_sources_are_named():
    with pytest.raises(ValueError, match="no source was given"):
        Mixture({})
    with pytest.raises(ValueError, match="source 'b' holds no samples"):
        Mixture({"a": numbered(3), "b": []})
    mixture = Mixture({"a": numbered(3), "b": numbered(3, s=4)})
    with pytest.raises(ValueError, match="samples of source 'b' have 5 tokens, those of 'a' 4"):
        next(Loader(mixture, micro_batch_size=6, microbatches=1, prefetch=0))
