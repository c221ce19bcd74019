"""What flash-attn is asked for, with a module that computes in plain torch what it documents."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from attention_cases import inputs, positions, sight_of, with_gradients
from torch import Tensor

from kenotron_cp import Scoring
from kenotron_dist import Axis
from kenotron_models import Build, attention_flash, build_decoder
from kenotron_models.attention_backends import attend, chosen
from kenotron_models.families import LlamaConfig

CALLS: list[str] = []


def one_sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> Tensor:
    """(S, H, K): causal, with ``left`` keys before a query and ``right`` after it (-1: all)."""
    ratio, places = q.shape[1] // k.shape[1], torch.arange(len(q))
    distance = places[:, None] - places
    mask = distance >= 0
    if left >= 0:
        mask &= distance <= left
    if right >= 0:
        mask &= -distance <= right
    k, v = (x.repeat_interleave(ratio, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.mT * scale
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    deterministic=False,
) -> Tensor:  # fmt: skip
    assert causal
    assert dropout_p == 0
    CALLS.append("deterministic func" if deterministic else "func")
    return torch.stack(
        [one_sequence(*row, softmax_scale, *window_size) for row in zip(q, k, v, strict=True)]
    )


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False,
) -> Tensor:  # fmt: skip
    assert causal
    assert dropout_p == 0
    assert q.ndim == k.ndim == v.ndim == 3
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max_seqlen_k == max(lengths)
    assert sum(lengths) == len(q)
    CALLS.append("deterministic varlen" if deterministic else "varlen")
    pieces = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([one_sequence(*piece, softmax_scale, *window_size) for piece in pieces])


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    module.__dict__.update(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(attention_flash, "installed", lambda: True)
    monkeypatch.setattr(attention_flash, "problem", lambda q: None)
    CALLS.clear()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 15, 99])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_flash_attn_is_asked_for_the_same_numbers(
    flash: None, window: int | None, documents: bool, kv_heads: int
) -> None:
    tensors, sight = inputs(3, 15, 4, kv_heads), sight_of(positions(15), window, documents)
    results = [
        with_gradients(
            lambda *x, name=name: attend(*x, sight, Scoring(0.7), name), tensors, torch.float32
        )
        for name in ("flash_attn", "plain", "auto")
    ]
    for got, want, automatic in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(automatic, got, rtol=0, atol=0)
    assert CALLS == ["varlen" if documents else "func"] * 2


@pytest.mark.parametrize("documents", [False, True])
def test_a_deterministic_run_asks_for_a_deterministic_backward(
    flash: None, documents: bool
) -> None:
    tensors, sight = inputs(3, 6, 2, 2), sight_of(positions(6), None, documents)
    torch.use_deterministic_algorithms(True)
    try:
        attend(*tensors, sight, Scoring(0.7), "flash_attn")
    finally:
        torch.use_deterministic_algorithms(False)
    assert CALLS == ["deterministic varlen" if documents else "deterministic func"]


class Elsewhere:
    """Queries of a device that is not here."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self.dtype, self.shape = dtype, (1, 4, 2, width)


@pytest.mark.parametrize(
    ("dtype", "width", "message"),
    [
        (torch.float32, 64, "tensors are float32; it needs bfloat16 or float16"),
        (torch.bfloat16, 260, "heads have 260 features; it needs a multiple of 8 up to 256"),
        (torch.float16, 12, "heads have 12 features"),
        (torch.float16, 128, None),
    ],
)
def test_what_it_cannot_compute(dtype: torch.dtype, width: int, message: str | None) -> None:
    found = attention_flash.problem(Elsewhere(dtype, width))  # type: ignore[arg-type]
    assert found is None if message is None else message in str(found)


def test_auto_takes_it_only_where_it_runs(flash: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, sight = torch.zeros(1, 4, 2, 8), sight_of(torch.arange(4)[None])
    assert chosen(q, sight) == "flash_attn"
    monkeypatch.setattr(attention_flash, "installed", lambda: False)
    assert chosen(q, sight) != "flash_attn"


def test_a_layer_is_not_built_for_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_flash, "installed", lambda: False)
    config = LlamaConfig(hidden_size=24, num_attention_heads=6, attn_implementation="flash_attn")
    with pytest.raises(ValueError, match="flash_attn: the package is not installed"):
        build_decoder(config, Build(Axis.solo("tp")))
