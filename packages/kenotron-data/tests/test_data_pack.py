"""Samples cover the stream, and every token but the first is predicted once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_data import PackedTokens, RandomTokens, split


@settings(max_examples=100, deadline=None)
@given(n=st.integers(2, 200), s=st.integers(1, 20))
def test_labels_of_all_samples_are_the_stream(n, s):
    tokens = np.arange(n, dtype=np.uint16)
    if n < s + 1:
        with pytest.raises(ValueError, match=f"the corpus has {n} tokens, but one sample"):
            PackedTokens(tokens, s)
        return
    data = PackedTokens(tokens, s)
    samples = [data.sample(i) for i in range(len(data))]
    assert all(sample.shape == (s + 1,) and sample.dtype == np.int64 for sample in samples)
    labels = np.concatenate([sample[1:] for sample in samples])
    assert np.array_equal(labels, np.arange(1, len(labels) + 1))
    assert n - 1 - len(labels) < s
    assert all(a[-1] == b[0] for a, b in zip(samples, samples[1:], strict=False))


def test_a_memory_mapped_stream_works(tmp_path):
    np.arange(10, dtype=np.uint32).tofile(tmp_path / "tokens.bin")
    stream = np.memmap(tmp_path / "tokens.bin", dtype=np.uint32, mode="r")
    assert PackedTokens(stream, 4).sample(1).tolist() == [4, 5, 6, 7, 8]
    stream._mmap.close()


def test_the_tail_is_held_out():
    tokens = np.arange(10, dtype=np.uint16)
    train, held_out = split(tokens, 0.25)
    assert train.tolist() == list(range(8))
    assert held_out.tolist() == [8, 9]
    train, held_out = split(tokens, 0)
    assert len(train) == 10
    assert len(held_out) == 0


def test_random_tokens_are_a_function_of_seed_and_index():
    a, b = RandomTokens(1000, 64, seed=1), RandomTokens(1000, 64, seed=1, samples=10**6)
    assert a.sample(12345).dtype == np.int64
    assert a.sample(12345).shape == (65,)
    assert np.array_equal(a.sample(12345), b.sample(12345))
    assert not np.array_equal(a.sample(12345), a.sample(12346))
    assert not np.array_equal(a.sample(0), RandomTokens(1000, 64, seed=2).sample(0))
    assert len(a) == 10**12
    assert len(b) == 10**6
    assert a.sample(10**12 - 1).max() < 1000
    assert RandomTokens(9, 3, seed=42).sample(5).tolist() == [5, 2, 7, 1]


def test_random_tokens_are_uniform():
    data = RandomTokens(50, 999, seed=0)
    counts = np.bincount(np.concatenate([data.sample(i) for i in range(50)]), minlength=50)
    assert abs(((counts - 1000) ** 2 / 1000).sum() - 49) < 5 * np.sqrt(2 * 49)


def test_a_short_corpus_is_named():
    with pytest.raises(ValueError, match="has 4 tokens, but one sample of sequence_length 4 needs"):
        PackedTokens(np.zeros(4, dtype=np.uint16), 4)


@pytest.mark.parametrize("tokens", [np.zeros((2, 2), dtype=np.int64), np.zeros(9)])
def test_what_is_no_stream_is_named(tokens):
    with pytest.raises(ValueError, match="one dimension of integers, but .* of shape"):
        PackedTokens(tokens, 2)
    with pytest.raises(ValueError, match="one dimension of integers, but .* of shape"):
        split(tokens, 0.1)


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match="sequence_length must be at least 1, but 0 was given"):
        PackedTokens(np.zeros(4, dtype=np.uint16), 0)
    with pytest.raises(ValueError, match="sequence_length must be at least 1, but -1 was given"):
        RandomTokens(10, -1, 0)
    with pytest.raises(ValueError, match=r"vocab_size must be from 1 to 2\*\*32, but 0 was given"):
        RandomTokens(0, 1, 0)
    with pytest.raises(ValueError, match="at least 1 sample, but 0 were asked for"):
        RandomTokens(10, 1, 0, samples=0)
    for fraction in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"less than 1, not {fraction}"):
            split(np.zeros(4, dtype=np.uint16), fraction)


@pytest.mark.parametrize("i", [-1, 3])
def test_an_index_out_of_range_is_named(i):
    for data in (PackedTokens(np.zeros(7, dtype=np.uint16), 2), RandomTokens(9, 2, 0, samples=3)):
        with pytest.raises(IndexError, match=f"there is no sample {i} in a dataset of 3 samples"):
            data.sample(i)
