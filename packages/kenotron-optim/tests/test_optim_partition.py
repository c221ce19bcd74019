"""Slices and buckets: pure arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_optim.partition import add, blocks, make_buckets, read, write


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 400))
def test_every_element_is_owned_once_and_comes_back(sizes: list[int], ranks: int, cap: int) -> None:
    tensors = {f"p{i}": torch.randn(n) for i, n in enumerate(sizes)}
    buckets = make_buckets(tensors, ranks, cap)
    assert [span.name for bucket in buckets for span in bucket.spans] == list(tensors)
    for bucket in buckets:
        buffer = bucket.buffer(torch.float32, torch.device("cpu"))
        assert buffer.shape == (ranks, bucket.width)
        for span in bucket.spans:
            value = tensors[span.name]
            write(buffer, span, value)
            add(list(blocks(buffer, span)), value)
            owned = [span.owned(rank) for rank in range(ranks)]
            assert [i for start, stop in owned for i in range(start, stop)] == list(
                range(span.numel)
            )
            rows = [
                buffer[rank, span.offset : span.offset + stop - start]
                for rank, (start, stop) in enumerate(owned)
            ]
            assert torch.equal(torch.cat(rows), 2 * value)
            assert torch.equal(read(buffer, span, value), 2 * value)


def test_a_bucket_holds_one_dtype_and_about_its_cap() -> None:
    tensors = {
        "a": torch.zeros(100),
        "b": torch.zeros(100),
        "c": torch.zeros(100),
        "half": torch.zeros(10, dtype=torch.bfloat16),
        "big": torch.zeros(1000, dtype=torch.bfloat16),
    }
    names = [[s.name for s in b.spans] for b in make_buckets(tensors, 2, 800)]
    assert names == [["a", "b"], ["c"], ["half"], ["big"]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("device", "ranks", "counts"),
    [
        ("meta", 1, [4, 4, 2]),
        ("meta", 40, [4, 4, 2]),
        ("meta", 60, [6, 4]),
        ("meta", 4096, [10]),
        ("cpu", 60, [1] * 10),
    ],
)
def test_without_a_cap_buckets_fit_the_device(
    device: str, ranks: int, counts: list[int], dtype: torch.dtype
) -> None:
    one = torch.zeros(1, dtype=dtype, device=device)
    tensors = {f"p{i}": one.expand(9_600_000) for i in range(10)}
    assert [len(bucket.spans) for bucket in make_buckets(tensors, ranks)] == counts


def test_a_cap_that_is_given_holds_on_every_device() -> None:
    tensors = {f"p{i}": torch.zeros(100, device="meta") for i in range(4)}
    assert [len(bucket.spans) for bucket in make_buckets(tensors, 2, 800)] == [2, 2]


def test_a_cap_that_holds_nothing() -> None:
    with pytest.raises(ValueError, match="0 bytes holds nothing"):
        make_buckets({"a": torch.zeros(1)}, 1, 0)
