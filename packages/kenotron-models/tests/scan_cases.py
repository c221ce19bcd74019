"""What tests of Mamba's and Mamba-2's scan share: inputs, masks, and the same comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kenotron_models.selective_scan import Scanned

R = 2


class Inputs(NamedTuple):
    """What a scan reads, in its order."""

    x: Tensor
    step: Tensor
    b: Tensor
    c: Tensor
    a: Tensor
    skip: Tensor
    bias: Tensor
    first: Tensor


Shape = tuple[int, ...]
Recurrence = Callable[..., tuple[Tensor, Tensor, Tensor]]
MASKS: dict[str, tuple[Tensor | None, Tensor | None]] = {
    "none": (None, None),
    "documents": (torch.arange(13).expand(R, -1) % 5 != 3, None),
    "padding": (None, torch.arange(13) < torch.tensor([[13], [7]])),
}


class Scan(Protocol):
    """The scan under test, in chunks."""

    def __call__(self, given: Inputs, chunk: int, **masks: Tensor | None) -> Scanned: ...


def drawn_inputs(
    tokens: tuple[Shape, ...], constants: tuple[Shape, ...], length: int, dtype: torch.dtype
) -> Inputs:
    """Draw inputs.

    Args:
        tokens: shapes of x, step, B and C of a token.
        constants: shapes of A, D, the bias and the first state of a row.
        length: L.
        dtype: of all.
    """
    generator = torch.Generator().manual_seed(length)

    def drawn(*shape: int) -> Tensor:
        draws = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return draws.to(dtype).requires_grad_()

    of_a, of_skip, of_bias, of_first = constants
    a = (-drawn(*of_a).exp()).detach().to(dtype).requires_grad_()
    rows = [drawn(R, length, *shape) for shape in tokens]
    return Inputs(*rows, a, drawn(*of_skip), drawn(*of_bias), drawn(R, *of_first))


def same_as_recurrence(
    inputs: Callable[[int], Inputs],
    recurrence: Recurrence,
    scan: Scan,
    mask: str,
    length: int,
    chunk: int,
) -> None:
    """Check outputs, states and all gradients against the definition, token by token."""
    goes_on, real = (m if m is None else m[:, :length] for m in MASKS[mask])
    results, grads = [], []
    for run in (recurrence, lambda g, *m: scan(g, chunk, goes_on=m[0], real=m[1])):
        given = inputs(length)
        found = tuple(run(given, goes_on, real))
        weights = [torch.cos(torch.arange(v.numel(), dtype=v.dtype)).view(v.shape) for v in found]
        sum((v * w).sum() for v, w in zip(found, weights, strict=True)).backward()
        results.append(found)
        grads.append([each.grad for each in given])
    for want, got in zip(results[0] + tuple(grads[0]), results[1] + tuple(grads[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def gradients_are_those_of_differences(inputs: Callable[[int], Inputs], scan: Scan) -> None:
    """Check gradients by finite differences."""
    goes_on = torch.tensor([[True] * 3 + [False, True], [True] * 5])
    given = tuple(each.detach().requires_grad_() for each in inputs(5))
    assert torch.autograd.gradcheck(
        lambda *g: tuple(scan(Inputs(*g), 2, goes_on=goes_on)), given, check_batched_grad=False
    )


def documents_are_apart(inputs: Callable[[int], Inputs], scan: Scan, chunk: int) -> None:
    """Check that no gradient, and no number, passes from a document to the one after it."""
    goes_on = torch.arange(12).expand(R, -1) != 6
    given = inputs(12)
    scan(given, chunk, goes_on=goes_on).y[:, 6:].sum().backward()
    for each in given[:4]:
        assert each.grad[:, :6].count_nonzero() == 0 and each.grad[:, 6:].count_nonzero()
    assert given.first.grad.count_nonzero() == 0
    again = inputs(12)
    with torch.no_grad():
        again.x[:, :6] *= 1e6
        again.step[:, :6] += 3
    one, two = (scan(each, chunk, goes_on=goes_on).y[:, 6:] for each in (given, again))
    assert torch.equal(one, two)


def bf16_is_computed_in_fp32(
    given: Inputs, recurrence: Recurrence, scan: Scan, bound: float
) -> None:
    """Check outputs and the last state of inputs in bf16, 96 tokens, against fp64."""
    want, state, _ = recurrence(Inputs(*(each.detach().double() for each in given)))
    got = scan(Inputs(*given[:7], given.first.float()), 32)
    assert got.y.dtype == torch.bfloat16 and got.state.dtype == torch.float32
    torch.testing.assert_close(got.state.double(), state, rtol=bound, atol=bound)
    torch.testing.assert_close(got.y.double(), want, rtol=2**-8, atol=1e-3)


def kept_bytes(given: Inputs, scan: Scan) -> int:
    """Return what the backward of chunks of 64 tokens keeps, without the inputs."""
    saved: dict[int, int] = {}

    def pack(each: Tensor) -> Tensor:
        saved[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        return each

    own = sum(each.untyped_storage().nbytes() for each in given)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        scan(given, 64)
    return sum(saved.values()) - own
