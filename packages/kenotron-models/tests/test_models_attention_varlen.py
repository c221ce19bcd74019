"""Which kernels attention asks for on devices that are not here, and what it asks them for."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from attention_cases import inputs, positions, sight_of, with_gradients
from test_models_attention_flash import one_sequence
from torch import Tensor
from torch.nn.attention import SDPBackend

from kenotron_cp import Scoring
from kenotron_models import Context, attention_backends, attention_flash, attention_varlen
from kenotron_models.attention_backends import attend, chosen, prepare
from kenotron_models.attention_mask import AttentionMask, document_lengths

CALLS: list[tuple[int, ...]] = []


def by_document(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size) -> Tensor:
    assert q.ndim == k.ndim == v.ndim == 3
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    assert sum(lengths) == len(q)
    CALLS.append(tuple(lengths))
    pieces = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([one_sequence(*piece, scale, *window_size) for piece in pieces])


def with_groups(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    scale=None, window_size=(-1, -1), enable_gqa=False,
) -> Tensor:  # fmt: skip
    """As in torch 2.13."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    return by_document(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def without_groups(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)
) -> Tensor:
    assert query.shape[1] == key.shape[1]
    scale = query.shape[-1] ** -0.5
    return by_document(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU pass for those of an H100 without flash-attn."""
    monkeypatch.setattr(attention_varlen, "capability", lambda device: (9, 0))
    monkeypatch.setattr(attention_varlen, "problem", lambda q: None)
    CALLS.clear()


@pytest.fixture(params=[with_groups, without_groups])
def kernel(elsewhere: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    module = SimpleNamespace(varlen_attn=request.param)
    load = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda n: module if n == attention_varlen.MODULE else load(n)
    )
    attention_varlen._kernel.cache_clear()
    yield
    attention_varlen._kernel.cache_clear()


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(
    ("window", "documents"), [(1, False), (3, False), (14, False), (None, True), (3, True)]
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_is_asked_for_the_same_numbers(
    kernel: None, window: int | None, documents: bool, kv_heads: int, host: bool
) -> None:
    tensors, places = inputs(3, 15, 4, kv_heads), positions(15)
    context = Context(places, host_positions_BS=places if host else None)
    sight = AttentionMask(context, window, documents)
    got = with_gradients(lambda *x: attend(*x, sight, Scoring(0.7)), tensors, torch.float32)
    assert CALLS == [(4, 3, 5, 1, 1, 1, 7, 8, 15) if documents else (15, 15, 15)]
    assert "mask" not in str(list(context._made)), "a full-square mask was made"
    sight = sight_of(places, window, documents)
    want = with_gradients(
        lambda *x: attend(*x, sight, Scoring(0.7), "plain"), tensors, torch.float32
    )
    for each, twin in zip(got, want, strict=True):
        torch.testing.assert_close(each, twin, rtol=1e-5, atol=1e-5)


def test_torch_has_the_kernel_with_these_parameters() -> None:
    assert attention_varlen.installed()
    attention_varlen._kernel.cache_clear()
    _, accepted = attention_varlen._kernel()
    assert {"cu_seq_q", "max_q", "window_size", "scale"} <= accepted


def test_lengths_are_read_from_the_host() -> None:
    places = positions(15)
    lengths = document_lengths(places)
    assert lengths.begins.tolist() == [0, 4, 7, 12, 13, 14, 15, 22, 30, 45]
    assert (lengths.begins.dtype, lengths.longest) == (torch.int32, 15)
    on_meta = places.to("meta")  # which has no values
    begins, longest = AttentionMask(Context(on_meta, host_positions_BS=places), None, True).lengths
    assert (begins.device.type, begins.shape, longest) == ("meta", (10,), 15)
    with pytest.raises(RuntimeError, match="meta"):
        _ = AttentionMask(Context(on_meta), None, True).lengths


@pytest.mark.parametrize(("window", "documents"), [(3, False), (None, True), (3, True)])
def test_blocks_are_read_from_the_host(window: int | None, documents: bool) -> None:
    places = positions(15)
    on_meta = Context(places.to("meta"), host_positions_BS=places)  # which has no values
    found = AttentionMask(on_meta, window, documents).blocks(4)
    assert found == AttentionMask(Context(places), window, documents).blocks(4)
    assert len(found) == (3 if documents else 1) and found[0][1] != (0, 0)


def test_rows_of_one_document_hide_nothing_more() -> None:
    whole, several = torch.arange(15).expand(3, 15), positions(15)
    for places, want in ((whole, True), (several, False)):
        context = Context(places.to("meta"), host_positions_BS=places)
        assert AttentionMask(context, None, documents=True).whole is want


@pytest.mark.parametrize(
    ("capability", "flash", "window", "documents", "want"),
    [
        ((9, 0), False, None, True, "varlen"),
        ((9, 0), True, None, True, "flash_attn"),
        ((9, 0), False, 3, False, "varlen"),
        ((9, 0), False, None, False, "sdpa"),
        ((8, 0), False, None, True, "varlen"),
        ((7, 5), False, None, True, "sdpa"),
        ((0, 0), False, None, True, "sdpa"),  # a CPU
    ],
)
def test_what_auto_takes(monkeypatch, elsewhere, capability, flash, window, documents, want):
    monkeypatch.setattr(attention_varlen, "capability", lambda device: capability)
    monkeypatch.setattr(attention_flash, "installed", lambda: flash)
    monkeypatch.setattr(attention_flash, "problem", lambda q: None)
    sight = sight_of(positions(15), window, documents)
    assert chosen(inputs(3, 15, 4, 4)[0], sight) == want


@pytest.mark.parametrize(
    ("capability", "first"),
    [((9, 0), "CUDNN_ATTENTION"), ((10, 0), "CUDNN_ATTENTION"), ((8, 0), None), ((0, 0), None)],
)
def test_cudnn_comes_first_from_hopper_on(monkeypatch, capability, first) -> None:
    monkeypatch.setattr(attention_varlen, "capability", lambda device: capability)
    before, orders = torch._C._get_sdp_priority_order(), []
    inner = torch.nn.functional.scaled_dot_product_attention

    def look(*tensors: Tensor, **how) -> Tensor:
        orders.append(torch._C._get_sdp_priority_order())
        return inner(*tensors, **how)

    monkeypatch.setattr(attention_backends.F, "scaled_dot_product_attention", look)
    sight = sight_of(torch.arange(8)[None])
    prepare(sight, "sdpa")
    attend(*inputs(1, 8, 4, 2), sight, Scoring(1.0), "sdpa")
    want = before if first is None else [int(each) for each in attention_backends.CUDNN_FIRST]
    assert orders[0][: len(want)] == want
    assert (orders[0][0] == int(SDPBackend.CUDNN_ATTENTION)) == (first is not None)
    assert torch._C._get_sdp_priority_order() == before  # and is put back


def test_a_cpu_has_no_capability() -> None:
    assert attention_varlen.capability(torch.device("cpu")) == (0, 0)
    assert not attention_varlen.device_has_varlen(torch.device("cpu"))


def test_prepare_makes_no_mask_where_a_kernel_needs_none(elsewhere: None) -> None:
    sight = sight_of(positions(15), None, True)
    prepare(sight, "auto")
    assert "mask" not in str(list(sight.context._made))
