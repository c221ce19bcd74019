"""The short convolution: torch's own where rows are whole, documents, and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_dist import Axis, Mesh, spawn
from kenotron_models import Build, Context, SequenceCut
from kenotron_models.segments import segments_of
from kenotron_models.short_convolution import ShortConvolution, tokens_before

R, C, W = 2, 5, 4


def made(bias: bool = True, dtype: torch.dtype = torch.float64) -> ShortConvolution:
    torch.manual_seed(0)
    layer = ShortConvolution(C, W, Build(Axis.solo("tp"), device=None, dtype=dtype), bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def by_torch(layer: ShortConvolution, row: Tensor) -> Tensor:
    """(R, W - 1 + L, C) -> (R, L, C)."""
    return F.conv1d(row.mT, layer.weight, layer.bias, groups=C).mT


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("length", [1, 3, 11])
def test_it_is_torchs_convolution_after_the_tokens_before(length: int, bias: bool) -> None:
    layer = made(bias)
    before, x = torch.randn(R, W - 1 + length, C, dtype=torch.float64).split((W - 1, length), 1)
    torch.testing.assert_close(
        layer(x, before, None), by_torch(layer, torch.cat([before, x], 1)), rtol=1e-13, atol=1e-13
    )


def test_a_token_sees_its_own_document_only() -> None:
    layer, x = made(), torch.randn(1, 9, C, dtype=torch.float64)
    since = torch.tensor([[0, 1, 0, 0, 1, 2, 3, 4, 0]])
    parts = [by_torch(layer, F.pad(each, (0, 0, W - 1, 0))) for each in x.split((2, 1, 5, 1), 1)]
    got = layer(x, torch.full((1, W - 1, C), 7.0, dtype=torch.float64), since)
    torch.testing.assert_close(got, torch.cat(parts, 1), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("since", [None, torch.tensor([[3, 4, 0, 1, 2], [0, 0, 1, 2, 3]])])
def test_its_gradients_are_those_of_differences(since: Tensor | None) -> None:
    layer = made()

    def run(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(
            layer, {"weight": weight, "bias": bias}, (x, before, since)
        )

    values = [torch.randn(R, 5, C), torch.randn(R, W - 1, C), layer.weight, layer.bias]
    assert torch.autograd.gradcheck(
        run, [each.detach().double().requires_grad_() for each in values], check_batched_grad=False
    )


def test_sums_are_fp32_and_rounded_once() -> None:
    layer = made(dtype=torch.bfloat16)
    before, x = torch.randn(R, W + 7, C).bfloat16().split((W - 1, 8), 1)
    wide = made(dtype=torch.float64)
    wide.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    leaves, wide_leaves = (before, x), (before.double(), x.double())
    got, want = (
        part(last.requires_grad_(), first.requires_grad_(), None)
        for part, (first, last) in ((layer, leaves), (wide, wide_leaves))
    )
    assert (got == want.to(torch.bfloat16)).float().mean() > 0.99
    grad = torch.randn(R, 8, C).bfloat16()
    for y, given in ((got, grad), (want, grad.double())):
        y.backward(given)
    for own, exact in zip(leaves, wide_leaves, strict=True):
        assert (own.grad == exact.grad.to(torch.bfloat16)).float().mean() > 0.99


def halo(mesh: Mesh, sequence: int, order: str) -> tuple[Tensor, list[int], Tensor, Tensor]:
    """What precedes this rank's pieces, their first places, and the gradient that returns."""
    from kenotron_cp import Layout, cut_sequence

    cp = mesh["cp"]
    layout = Layout(order=order)
    whole = torch.arange(sequence).expand(2, -1)
    values = (1 + torch.arange(2 * sequence * 3.0)).view(2, sequence, 3)
    own = cut_sequence(values, cp, layout=layout).requires_grad_()
    cut = SequenceCut(cp, whole, layout=layout)
    segments = segments_of(Context(cut_sequence(whole, cp, layout=layout), cut=cut))
    assert segments is not None
    before = tokens_before(own, W - 1, segments)
    before.sum().backward()
    assert own.grad is not None
    places = cut.places_S.view(segments.pieces, -1)[:, 0].tolist()
    return before.detach(), places, own.grad, cut.places_S


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize(("sequence", "cp"), [(32, 2), (15, 2), (20, 4), (15, 4)])
def test_pieces_follow_the_last_tokens_before_them(sequence: int, cp: int, order: str) -> None:
    """Also where pieces are shorter than the convolution, and where padding follows."""
    values = F.pad((1 + torch.arange(2 * sequence * 3.0)).view(2, sequence, 3), (0, 0, W - 1, 99))
    counted = torch.zeros(sequence + 99)
    ranks = spawn(halo, sequence, order, cp=cp)
    for before, places, _, _ in ranks:
        rows = before.view(2, len(places), W - 1, 3)
        for piece, place in enumerate(places):
            assert torch.equal(rows[:, piece], values[:, place : place + W - 1])
            counted[max(place - W + 1, 0) : place] += 1
    for _, _, grad, places in ranks:
        assert torch.equal(grad[0, :, 0], counted[places])


def test_a_width_that_does_not_divide_is_named() -> None:
    axis = Axis("tp", 0, (0, 1), backend="nccl")
    with pytest.raises(
        ValueError, match="cannot split 5 channels over 2 tp ranks: choose a tensor"
    ):
        ShortConvolution(C, W, Build(axis))
