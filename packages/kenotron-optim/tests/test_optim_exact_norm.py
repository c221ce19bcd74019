"""The norm in whole numbers: the same bits however tensors are cut, and right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import ExactNorm, GlobalNorm, SampleGradients

SIZES = {"large": 70_001, "small": 37, "one": 1}


class Tensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))


def gradient(name: str, kind: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(SIZES[name])
    found = torch.randn(SIZES[name], generator=draw) * 10 ** torch.randn(1, generator=draw)
    spread = torch.randint(-30, 8, found.shape, generator=draw).double()
    if kind == "spread":
        return (found * 10.0**spread).float()
    if kind in ("nan", "inf") and name == "small":
        found[5] = float(kind)
    scale = {"huge": 3e38 / found.abs().amax(), "tiny": 1e-41}.get(kind, 1.0)
    return found.mul(scale) if kind != "zero" else found.zero_()


def measured(mesh: Mesh, kind: str) -> tuple[float, dict[str, float], float]:
    model = Tensors()
    grads = SampleGradients(named_parameters(model), parameter_layouts(model, mesh.sizes), mesh)
    grads.start(1)
    first = mesh["dp"].rank == 0  # other samples have none
    for name, parameter in model.named_parameters():
        parameter.backward(gradient(name, kind) if first else torch.zeros_like(parameter))
    slices = grads.finish()
    exact = ExactNorm(grads)
    return exact(slices).item(), exact.norms(slices), GlobalNorm(grads)(slices).item()


def exactly(kind: str, names: list[str]) -> float:
    values = (x for name in names for x in gradient(name, kind).double().tolist())
    return math.sqrt(math.fsum(x * x for x in values))


@pytest.mark.parametrize("kind", ["usual", "spread", "huge", "tiny", "zero"])
def test_norms_are_right_and_the_same_on_every_cut(kind: str) -> None:
    [alone] = on_ranks(measured, kind)
    assert alone[0] == pytest.approx(exactly(kind, list(SIZES)), rel=1e-13)
    for name, norm in alone[1].items():
        assert norm == pytest.approx(exactly(kind, [name]), rel=1e-13)
    for dp in (2, 3, 4):
        assert all(rank[:2] == alone[:2] for rank in on_ranks(measured, kind, dp=dp))


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_numbers_that_are_not_finite_stay_so(kind: str) -> None:
    for sizes in ({}, {"dp": 3}):
        for norm, each, usual in on_ranks(measured, kind, **sizes):
            assert str(norm) == str(each["small"]) == str(usual) == kind
            assert math.isfinite(each["large"])
