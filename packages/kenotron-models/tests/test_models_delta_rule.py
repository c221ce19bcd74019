"""The gated delta rule in chunks against the recurrence, one token after the other, in fp64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from kenotron_models.delta_rule import Delta, delta_rule, state_map

ROWS, HEADS, KEY, VALUE = 2, 3, 5, 4


def drawn(length: int, dtype: torch.dtype = torch.float64, documents: bool = False) -> Delta:
    torch.manual_seed(length)
    draw = partial(torch.randn, ROWS, length, HEADS, dtype=dtype)
    q, k, v = (torch.randn(ROWS, length, HEADS, n, dtype=dtype) for n in (KEY, KEY, VALUE))
    goes_on = torch.rand(ROWS, length) > 0.3 if documents else None
    k = torch.nn.functional.normalize(k, dim=-1)
    return Delta(q, k, v, -draw().abs(), draw().sigmoid(), goes_on)


def one_after_the_other(x: Delta, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    state = torch.zeros(ROWS, HEADS, KEY, VALUE, dtype=x.q.dtype) if first is None else first
    out = []
    for t in range(x.q.shape[1]):
        if x.goes_on is not None:
            state = state * x.goes_on[:, t, None, None, None]
        q, k, v, decay, share = (part[:, t] for part in x[:5])
        state = state * decay.exp()[..., None, None]
        missing = v - torch.einsum("rhkv,rhk->rhv", state, k)
        state = state + torch.einsum("rhk,rhv->rhkv", k * share[..., None], missing)
        out.append(torch.einsum("rhkv,rhk->rhv", state, q))
    return torch.stack(out, 1), state


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("length", [1, 3, 4, 11, 70])
def test_chunks_compute_the_recurrence(length: int, chunk: int, documents: bool) -> None:
    x = drawn(length, documents=documents)
    first = torch.randn(ROWS, HEADS, KEY, VALUE, dtype=torch.float64)
    for got, want in zip(
        delta_rule(x, first, chunk=chunk), one_after_the_other(x, first), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
def test_a_row_is_a_map_of_the_state_before_it(documents: bool) -> None:
    x = drawn(11, documents=documents)
    first = torch.randn(ROWS, HEADS, KEY, VALUE, dtype=torch.float64)
    matrix, last = state_map(x, chunk=4)
    torch.testing.assert_close(matrix @ first + last, one_after_the_other(x, first)[1])


@pytest.mark.parametrize("documents", [False, True])
def test_gradients_are_finite_differences(documents: bool) -> None:
    x, first = drawn(7, documents=documents), torch.randn(ROWS, HEADS, KEY, VALUE).double()
    leaves = [part.requires_grad_() for part in (*x[:5], first)]

    def run(*parts: Tensor) -> tuple[Tensor, ...]:
        made = Delta(*parts[:5], x.goes_on)
        return *delta_rule(made, parts[5], chunk=3), *state_map(made, chunk=3)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("chunk", [4, 64])
def test_no_document_sees_another(chunk: int) -> None:
    x = drawn(12)
    x = x._replace(goes_on=(torch.arange(12) != 7).expand(ROWS, -1))
    leaves = [part.requires_grad_() for part in x[:5]]
    y, _ = delta_rule(x, torch.ones(ROWS, HEADS, KEY, VALUE).double(), chunk=chunk)
    y[:, 7:].sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert not leaf.grad[:, :7].any() and leaf.grad[:, 7:].any()


def test_strong_decay_and_bf16_stay_finite() -> None:
    x = drawn(70, torch.float32)
    x = x._replace(log_decay=x.log_decay * 200)
    y, state = delta_rule(x)
    assert y.isfinite().all() and state.isfinite().all()
    half = x._replace(**{name: getattr(x, name).bfloat16() for name in ("q", "k", "v")})
    y, state = delta_rule(half)
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32 and y.isfinite().all()
