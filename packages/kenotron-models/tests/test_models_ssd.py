"""Mamba-2's scan in chunks against the recurrence, token by token in fp64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_models.selective_scan import Constants, Scanned
from kenotron_models.ssd import structured_scan

R, H, P, G, N = 2, 4, 3, 2, 5
LIMITS = (0.05, 1.5)


class Inputs(NamedTuple):
    x: Tensor
    step: Tensor
    b: Tensor
    c: Tensor
    a: Tensor
    skip: Tensor
    bias: Tensor
    first: Tensor


def inputs(length: int, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(length)

    def drawn(*shape: int) -> Tensor:
        draws = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return draws.to(dtype).requires_grad_()

    a = (-drawn(H).exp()).detach().to(dtype).requires_grad_()
    tokens = [drawn(R, length, *shape) for shape in ((H, P), (H,), (G, N), (G, N))]
    return Inputs(*tokens, a, drawn(H), drawn(H), drawn(R, H, P, N))


def recurrence(
    given: Inputs, goes_on: Tensor | None = None, real: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition."""
    x, step, b, c, a, skip, bias, state = given
    d, outs = F.softplus(step + bias).clamp(*LIMITS), []
    if real is not None:
        d = d * real[..., None]
    b, c = (each.repeat_interleave(H // G, 2) for each in (b, c))
    for t in range(x.shape[1]):
        if goes_on is not None:
            state = state * goes_on[:, t, None, None, None]
        fed = torch.einsum("rh,rhp,rhn->rhpn", d[:, t], x[:, t], b[:, t])
        state = torch.exp(d[:, t] * a)[..., None, None] * state + fed
        outs.append(torch.einsum("rhpn,rhn->rhp", state, c[:, t]) + skip[:, None] * x[:, t])
    return torch.stack(outs, 1), state, d.sum(1)


def scanned(given: Inputs, chunk: int, **masks: Tensor | None) -> Scanned:
    x, step, b, c, *constants, first = given
    how = {"limits": LIMITS, "first": first, "chunk": chunk, **masks}
    return structured_scan(x, step, b, c, Constants(*constants), **how)


MASKS = {
    "none": (None, None),
    "documents": (torch.arange(13).expand(R, -1) % 5 != 3, None),
    "padding": (None, torch.arange(13) < torch.tensor([[13], [7]])),
}


@pytest.mark.parametrize("chunk", [1, 4, 13, 64])
@pytest.mark.parametrize("length", [1, 4, 13])
@pytest.mark.parametrize("mask", MASKS)
def test_outputs_states_and_gradients_are_those_of_the_recurrence(
    mask: str, length: int, chunk: int
) -> None:
    goes_on, real = (m if m is None else m[:, :length] for m in MASKS[mask])
    results, grads = [], []
    for run in (recurrence, lambda g, *m: scanned(g, chunk, goes_on=m[0], real=m[1])):
        given = inputs(length)
        found = tuple(run(given, goes_on, real))
        weights = [torch.cos(torch.arange(v.numel(), dtype=v.dtype)).view(v.shape) for v in found]
        sum((v * w).sum() for v, w in zip(found, weights, strict=True)).backward()
        results.append(found)
        grads.append([each.grad for each in given])
    for want, got in zip(results[0] + tuple(grads[0]), results[1] + tuple(grads[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_its_gradients_are_those_of_differences() -> None:
    goes_on = torch.tensor([[True] * 3 + [False, True], [True] * 5])
    given = tuple(each.detach().requires_grad_() for each in inputs(5))
    assert torch.autograd.gradcheck(
        lambda *g: tuple(scanned(Inputs(*g), 2, goes_on=goes_on)), given, check_batched_grad=False
    )


@pytest.mark.parametrize("chunk", [3, 8])
def test_nothing_passes_from_one_document_to_another(chunk: int) -> None:
    goes_on = torch.arange(12).expand(R, -1) != 6
    given = inputs(12)
    scanned(given, chunk, goes_on=goes_on).y[:, 6:].sum().backward()
    for each in given[:4]:
        assert each.grad[:, :6].count_nonzero() == 0 and each.grad[:, 6:].count_nonzero()
    assert given.first.grad.count_nonzero() == 0
    again = inputs(12)
    with torch.no_grad():
        again.x[:, :6] *= 1e6
        again.step[:, :6] += 3
    one, two = (scanned(each, chunk, goes_on=goes_on).y[:, 6:] for each in (given, again))
    assert torch.equal(one, two)


def test_bf16_is_computed_in_fp32() -> None:
    given = inputs(96, torch.bfloat16)
    want, state, _ = recurrence(Inputs(*(each.detach().double() for each in given)))
    got = scanned(Inputs(*given[:7], given.first.float()), 32)
    assert got.y.dtype == torch.bfloat16 and got.state.dtype == torch.float32
    torch.testing.assert_close(got.state.double(), state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.y.double(), want, rtol=2**-8, atol=1e-3)


def test_memory_is_linear_in_the_sequence_and_has_no_scores() -> None:
    for length in (256, 512):
        saved: dict[int, int] = {}

        def pack(each: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
            return each

        given = inputs(length, torch.float32)
        own = sum(each.untyped_storage().nbytes() for each in given)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            scanned(given, 64)
        assert sum(saved.values()) - own <= length // 64 * R * H * P * N * 4
