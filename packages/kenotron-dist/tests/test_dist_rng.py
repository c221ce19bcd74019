"""Masks are functions of global coordinates; streams continue where they stood."""

import json
import math

import pytest
import torch

from kenotron_dist.rng import (
    RngStreams,
    counter_key,
    dropout,
    in_unit_interval,
    keep_mask,
    uniform,
)

B, S, F = 6, 32, 48
SAMPLES, POSITIONS = torch.arange(100, 100 + B), torch.arange(S).expand(B, S)
BASE = counter_key(1, "step", 5, "layers.0.attention")


def mask(samples=SAMPLES, positions=POSITIONS, first=0, features=F, p=0.1, base=BASE):
    return keep_mask(p, base, samples, positions, first, features)


def test_any_split_of_samples_positions_and_features_cuts_the_same_mask():
    whole = mask()
    assert whole.shape == (B, S, F) and whole.dtype == torch.bool
    assert torch.equal(mask(), whole)
    shards = [mask(first=first, features=12) for first in range(0, F, 12)]
    assert torch.equal(torch.cat(shards, 2), whole)
    pieces = [mask(positions=piece) for piece in POSITIONS.split([5, 20, 7], 1)]
    assert torch.equal(torch.cat(pieces, 1), whole)
    micro = [mask(SAMPLES[i : i + 2], POSITIONS[i : i + 2]) for i in range(0, B, 2)]
    assert torch.equal(torch.cat(micro), whole)
    order = torch.tensor([3, 1, 0, 5, 2, 4])
    assert torch.equal(mask(SAMPLES[order]), whole[order])
    assert torch.equal(mask(positions=POSITIONS.flip(1)), whole.flip(1))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept_is_near_one_minus_p(p):
    samples, positions = torch.arange(16), torch.arange(64).expand(16, 64)
    kept = mask(samples, positions, features=256, p=p).double()
    assert abs(kept.mean() - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / kept.numel())
    for dims in ((0, 1), (0, 2), (1, 2)):  # and along each coordinate alone
        shares = kept.mean(dims)
        assert (shares - (1 - p)).abs().max() <= 6 * math.sqrt(p * (1 - p) / 1024)


def test_steps_layers_and_neighbours_are_independent():
    bases = [counter_key(1, "step", step, layer) for step in (0, 1) for layer in ("a", "b")]
    bases += [counter_key(2, "step", 0, "a"), BASE, BASE + 1]
    masks = torch.stack([mask(p=0.5, base=base).flatten() for base in bases]).double()
    apart = torch.corrcoef(masks) - torch.eye(len(bases))
    assert apart.abs().max() < 5 / math.sqrt(B * S * F)
    one = mask(p=0.5).double() - 0.5
    for dim in range(3):
        for shift in (1, 2):
            assert abs((one * one.roll(shift, dim)).mean() * 4) < 5 / math.sqrt(B * S * F)


def test_coordinates_are_not_interchangeable():
    i = torch.arange(64)
    table = uniform(7, i[:, None], i[None, :])
    assert table.unique().numel() > 4090
    assert not torch.equal(table, table.t())
    assert uniform(7, i[:, None, None], i[:3, None], i[:5]).shape == (64, 3, 5)


def test_numbers_are_uniform_and_never_an_end():
    for dtype, steps in ((torch.float32, 23), (torch.float64, 52)):
        x = uniform(counter_key("u"), torch.arange(1_000_000), dtype=dtype)
        assert x.dtype == dtype
        assert 0 < x.min() and x.max() < 1
        assert abs(x.double().mean() - 0.5) < 5 / math.sqrt(12e6)
        counts = torch.histc(x.double(), 100, 0, 1)
        assert ((counts - 10_000) ** 2 / 10_000).sum() < 170  # chi square, 99 degrees
        scaled = x.double() * 2**steps
        assert torch.equal(scaled, scaled.floor() + 0.5)


def test_the_largest_number_is_below_one():
    """24 bits and a half would round to 1, and make a Gumbel number infinite."""
    ones = torch.tensor([-1])  # 64 bits that are all set
    for dtype in (torch.float32, torch.float64):
        top = in_unit_interval(ones, dtype)
        assert 0.9999999 < top.item() < 1
        assert 0 < in_unit_interval(ones * 0, dtype).item() < 1e-6


def split_mix(state):
    """One output of SplitMix64, in Python's own integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ state >> shift) * factor % 2**64
    return state ^ state >> 31


def test_numbers_are_those_of_split_mix_by_hand():
    base = counter_key(0, "x")
    for sample, position in ((0, 0), (1, 5), (2**40, 2**62), (7, 3)):
        state = base % 2**64
        for coordinate in (sample, position):
            state = split_mix((state + (coordinate + 1) * 0x9E3779B97F4A7C15) % 2**64)
        where = torch.tensor([sample]), torch.tensor([position])
        assert uniform(base, *where).item() == ((state >> 41) + 0.5) / 2**23
        assert uniform(base, *where, dtype=torch.float64).item() == ((state >> 12) + 0.5) / 2**52


def test_dropout_scales_what_it_keeps():
    x, kept = torch.ones(B, S, F, dtype=torch.bfloat16), mask(p=0.5)
    out = dropout(x, 0.5, kept)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, kept.bfloat16() * 2)
    assert torch.equal(dropout(x, 0.0, mask(p=0.0)), x)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_probability_outside_its_range_is_an_error(p):
    with pytest.raises(ValueError, match=rf"dropout probability {p} is not within \[0, 1\)"):
        mask(p=p)


def test_no_coordinates_is_an_error():
    with pytest.raises(ValueError, match="uniform: give at least one tensor of global indices"):
        uniform(0)


def numbers(streams, name, count=4):
    return torch.randn(count, generator=streams[name]).tolist()


def test_streams_are_apart_by_seed_and_name_and_do_not_touch_the_global_one():
    before = torch.get_rng_state()
    first, second = RngStreams(0), RngStreams(0)
    assert numbers(first, "a") != numbers(first, "b")
    numbers(second, "z")
    assert numbers(RngStreams(0), "a") == numbers(second, "a")
    assert numbers(RngStreams(1), "a") != numbers(RngStreams(0), "a")
    assert torch.equal(torch.get_rng_state(), before)


def test_streams_continue_where_they_stood():
    streams = RngStreams(3)
    numbers(streams, "a"), numbers(streams, "b", 5)
    saved = json.dumps(streams.capture())
    ahead = [numbers(streams, "a"), numbers(streams, "b")]
    other = RngStreams(99)
    numbers(other, "c")
    other.restore(json.loads(saved))
    assert [numbers(other, "a"), numbers(other, "b")] == ahead
    assert sorted(other.capture()) == ["a", "b"]  # what was not saved starts afresh
    assert numbers(other, "c") == numbers(RngStreams(99), "c")


@pytest.mark.parametrize("bad", ["", "AAAA", "*", "é"])
def test_a_state_that_is_none_is_an_error_and_changes_nothing(bad):
    streams = RngStreams(3)
    numbers(streams, "a")
    saved = streams.capture()
    with pytest.raises(ValueError, match="state of random stream 'b' cannot be restored: "):
        streams.restore({"a": saved["a"], "b": bad})
    assert streams.capture() == saved
