"""Every back end of attention against the formula: what is seen, groups of heads, dtypes."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    deviation,
    formula,
    inputs,
    positions,
    seen,
    sight_of,
    with_gradients,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron_cp import Scoring
from kenotron_models import attention_blocked
from kenotron_models.attention_backends import AttentionBackend, attend, chosen
from kenotron_models.attention_flash import attend_flash
from kenotron_models.attention_mask import document_starts

BACKENDS: list[AttentionBackend] = ["sdpa", "blocked", "plain", "auto"]
SIGHTS = [(None, False), (1, False), (3, False), (99, False), (None, True), (3, True), (1, True)]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest value of each tensor


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a short row, and several steps over the heads."""
    monkeypatch.setattr(attention_blocked, "ROWS", 4)
    monkeypatch.setattr(attention_blocked, "QUERIES", (2, 4))
    monkeypatch.setattr(attention_blocked, "SCORES", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("window", "documents"), SIGHTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_back_end_computes_the_formula(
    backend: AttentionBackend,
    window: int | None,
    documents: bool,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
) -> None:
    tensors = [x.to(dtype) for x in inputs(3, 15, heads, kv_heads)]
    places, scale = positions(15), 0.7  # not the root of K
    mask = seen(places, window, documents)
    want = with_gradients(lambda *x: formula(*x, mask, scale), tensors, torch.float64)
    sight = sight_of(places, window, documents)
    got = with_gradients(lambda *x: attend(*x, sight, Scoring(scale), backend), tensors, dtype)
    names = ("out", "q", "k", "v")
    for name, a, b in zip(names, got, want, strict=True):
        assert deviation(a, b) <= BOUNDS[dtype], name


@settings(deadline=None, max_examples=60)
@given(
    sequence=st.integers(1, 23),
    ratio=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    window=st.none() | st.integers(1, 25),
    documents=st.booleans(),
    data=st.data(),
)
def test_any_sizes(
    sequence: int,
    ratio: int,
    kv_heads: int,
    window: int | None,
    documents: bool,
    data: st.DataObject,
) -> None:
    row = st.lists(st.integers(-2, 3), min_size=sequence, max_size=sequence)
    places = torch.tensor([data.draw(row), data.draw(row)])
    tensors = inputs(2, sequence, ratio * kv_heads, kv_heads, width=4)
    mask, sight = seen(places, window, documents), sight_of(places, window, documents)
    assert torch.equal(sight.full_mask_BSS.expand_as(mask), mask)
    want = with_gradients(lambda *x: formula(*x, mask, 0.3), tensors, torch.float64)
    for backend in BACKENDS:
        got = with_gradients(
            lambda *x, name=backend: attend(*x, sight, Scoring(0.3), name),
            tensors,
            torch.float32,
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "documents"), [(None, False), (3, True)])
def test_the_blocked_gradient_is_the_derivative(window: int | None, documents: bool) -> None:
    tensors = [x.double().requires_grad_() for x in inputs(2, 7, 4, 2, width=2)]
    sight = sight_of(positions(7)[:2], window, documents)
    scoring = Scoring(0.6)
    assert torch.autograd.gradcheck(
        lambda *x: attention_blocked.attend_blocks(*x, sight, scoring), tensors, fast_mode=False
    )


def test_blocks_keep_no_scores() -> None:
    tensors = [x.requires_grad_() for x in inputs(1, 64, 2, 2)]
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        attend(*tensors, sight_of(torch.arange(64)[None], 9), Scoring(1.0), "blocked")
    assert sum(kept) == sum(x.numel() for x in tensors)


def test_documents_begin_where_positions_do_not_go_on() -> None:
    places = torch.tensor([[3, 4, 5, 0, 1, 9, 10, 10], [4, 0, 1, 1, 2, 3, 4, 3], [*range(8)]])
    starts = document_starts(sight_of(places).context)
    assert starts.tolist() == [[0, 0, 0, 3, 3, 5, 5, 7], [0, 1, 1, 3, 3, 3, 3, 7], [0] * 8]


def test_masks_are_made_once_and_only_where_something_is_hidden() -> None:
    places = torch.arange(8).expand(2, 8)
    whole = sight_of(places, window=8, documents=True)  # one document, and a window over all of it
    assert whole.whole
    assert whole.mask_BSS is None
    assert whole.lengths[0].tolist() == [0, 8, 16]
    narrow = sight_of(places, window=7)
    assert not narrow.whole
    assert narrow.mask_BSS is narrow.full_mask_BSS  # one tensor for all that read it
    assert narrow.full_mask_BSS.shape == (1, 8, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_at_the_right_changes_nothing(backend: AttentionBackend) -> None:
    tensors, places = inputs(1, 12, 4, 2), torch.arange(12)[None].clone()
    short = [x[:, :7] for x in tensors]
    want = attend(*short, sight_of(places[:, :7], 4, True), Scoring(0.5), backend)
    for filler in ([0] * 5, [-1] * 5, [3, 1, 4, 1, 5], [7, 8, 9, 10, 11]):
        places[0, 7:] = torch.tensor(filler)
        got = attend(*tensors, sight_of(places, 4, True), Scoring(0.5), backend)
        assert got.isfinite().all()
        torch.testing.assert_close(got[:, :7], want)


def test_auto_takes_blocks_where_they_are_faster() -> None:
    def of(sequence: int, window: int | None, dtype: torch.dtype, width: int = 8) -> str:
        q = torch.zeros(1, sequence, 2, width, dtype=dtype)
        return chosen(q, sight_of(torch.arange(sequence)[None], window))

    assert of(511, 3, torch.float32) == of(512, None, torch.float32) == "sdpa"
    assert of(255, None, torch.bfloat16) == of(512, None, torch.bfloat16, 128) == "sdpa"
    assert of(256, None, torch.bfloat16) == of(512, 3, torch.float32) == "blocked"


def test_an_ordered_back_end_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, sight = inputs(1, 4, 2, 2), sight_of(torch.arange(4)[None])
    monkeypatch.setattr("kenotron_models.attention_flash.installed", lambda: False)
    with pytest.raises(ValueError, match=r"not installed; install flash-attn.*choose auto or sdpa"):
        attend(*tensors, sight, Scoring(1.0), "flash_attn")
    monkeypatch.setattr("kenotron_models.attention_flash.installed", lambda: True)
    with pytest.raises(ValueError, match="flash_attn: tensors are on cpu; it needs a CUDA device"):
        attend_flash(*tensors, sight, Scoring(1.0))
