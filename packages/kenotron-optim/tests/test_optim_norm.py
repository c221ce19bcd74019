"""Reduction, norm and clipping against torch on one process, for every kind of placement."""

from __future__ import annotations

import contextlib
from unittest import mock

import optim_pieces as model
import pytest
import torch
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_optim import GlobalNorm, GradAccumulator, clip, clip_
from kenotron_optim.clip import _powers

NORMS = (1.0, 2.0, float("inf"))
LIMIT = 0.75
TIGHT = {"rtol": 1e-7, "atol": 1e-6}
LAYOUTS = [
    *({"dp": n} for n in (1, 2, 3, 5)),
    {"pp": 2},
    {"tp": 2},
    {"tp": 4},
    {"pp": 2, "dp": 2},
    {"pp": 2, "dp": 3},
    {"dp": 2, "tp": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
]


def measure(mesh: Mesh, fault: str = "", dtype: torch.dtype = torch.float32) -> dict:
    """Norms of all kinds, and the slices before and after clipping by each."""
    counts_all = mock.patch.object(clip, "norm_weight", lambda *_: 1.0)
    with counts_all if fault == "replicas count" else contextlib.nullcontext():
        held = model.hold(mesh, fault.removeprefix("no "), dtype)
        slices = model.backward(held, mesh)
        if fault == "one mean":  # one tensor's gradient averaged, where all others are added
            slices.get("whole", torch.zeros(1)).div_(mesh["dp"].size)
        found = {"slices": plain(slices), **mesh.coords}
        for kind in NORMS:
            norm = GlobalNorm(held.grads, kind)
            own = {name: slice_.clone() for name, slice_ in slices.items()}
            value, each = norm(own), norm.norms(own)
            coefficient = clip_(own, LIMIT, value)
            clipped = {"slices": plain(own), **mesh.coords}
            found[kind] = (value.item(), each, coefficient.item(), clipped)
    return found


def plain(slices: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: slice_.tolist() for name, slice_ in slices.items()}


def check(ranks: list[dict], dp: int = 1, tp: int = 1, **_: int) -> None:
    """Everything that the ranks measured is what torch finds."""
    want = model.expected(dp, tp)
    got = model.whole(ranks, dp, tp)
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name
    for kind in NORMS:
        value, each, coefficient, _ = ranks[0][kind]
        assert all(rank[kind][:3] == (value, each, coefficient) for rank in ranks)
        parameters = {name: nn.Parameter(g.double()) for name, g in want.items()}
        for name, p in parameters.items():
            p.grad = want[name].double()
            assert each[name] == pytest.approx(p.grad.norm(kind).item(), rel=1e-12, abs=0)
        norm = nn.utils.clip_grad_norm_(parameters.values(), LIMIT, kind)
        assert value == pytest.approx(norm.item(), rel=1e-12, abs=0)
        clipped = model.whole([rank[kind][3] for rank in ranks], dp, tp)
        for name, p in parameters.items():
            torch.testing.assert_close(clipped[name], p.grad.float(), **TIGHT)
        assert coefficient < 1 and not torch.equal(clipped["whole"], want["whole"])


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_gradients_norms_and_clipping_equal_torch(sizes: dict[str, int]) -> None:
    check(on_ranks(measure, **sizes), **sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [{"dp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_half_precision_is_measured_and_clipped_in_fp32(
    dtype: torch.dtype, sizes: dict[str, int]
) -> None:
    check(on_ranks(measure, "", dtype, **sizes), **sizes)


@pytest.mark.parametrize("sizes", [{}, {"dp": 2}, {"dp": 3}, {"tp": 2}], ids=str)
def test_where_the_pipeline_cuts_changes_no_bit(sizes: dict[str, int]) -> None:
    def numbers(pp: int) -> list:
        rank = on_ranks(measure, pp=pp, **sizes)[0]
        return [rank[kind][:3] for kind in NORMS]

    assert numbers(1) == numbers(2)


@pytest.mark.parametrize(
    ("fault", "sizes", "seen_at"),
    [
        ("replicas count", {"tp": 2}, "comparison failed"),
        ("replicas count", {"pp": 2}, "comparison failed"),
        ("no tie", {}, "embed"),
        ("no tie", {"pp": 2}, "embed"),
        ("no partial", {"tp": 2}, "norm"),
        ("one mean", {"dp": 2}, "whole"),
    ],
)
def test_a_planted_bug_is_seen(fault: str, sizes: dict[str, int], seen_at: str) -> None:
    with pytest.raises(AssertionError, match=seen_at):
        check(on_ranks(measure, fault, **sizes), **sizes)


def one_weight(mesh: Mesh) -> tuple[GradAccumulator, nn.Module]:
    layer = nn.Linear(2, 1, bias=False)
    layouts = parameter_layouts(layer, mesh.sizes)
    return GradAccumulator(named_parameters(layer), layouts, mesh), layer


def test_a_gradient_below_the_limit_is_left_as_it_is() -> None:
    slices = {"a": torch.tensor([3.0, 4.0])}
    assert clip_(slices, 10.0, torch.tensor(5.0, dtype=torch.float64)) == 1
    assert slices["a"].tolist() == [3.0, 4.0]


def test_squares_beyond_fp32_are_counted() -> None:
    grads, layer = one_weight(Mesh.connect())
    grads.start()
    layer.weight.backward(torch.tensor([[3e30, 4e30]]))
    norm = GlobalNorm(grads)(grads.finish())
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(5e30, rel=1e-6)


@pytest.mark.parametrize("kind", NORMS)
def test_without_parameters_the_norm_is_zero(kind: float) -> None:
    grads = GradAccumulator({}, {}, Mesh.connect())
    norm = GlobalNorm(grads, kind)
    assert norm({}) == 0 and norm.norms({}) == {}
    assert clip_({}, 1.0, norm({})) == 1


def test_other_norms_are_refused() -> None:
    grads, _ = one_weight(Mesh.connect())
    with pytest.raises(ValueError, match="norm_type 3 is not available: choose 1, 2 or inf"):
        GlobalNorm(grads, 3)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_none(limit: float) -> None:
    with pytest.raises(ValueError, match=f"cannot clip to a norm of {limit}: it must be above 0"):
        clip_({}, limit, torch.tensor(1.0))


@pytest.mark.parametrize("norm_type", [1, 2, float("inf")])
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e-25, 1e25, 0.0])
def test_large_tensors_in_short_rows(norm_type: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(n, generator=generator) * scale for n in (5000, 300_001, 3, 1 << 18)]
    views[1][:256] *= 1e-8
    found = _powers(views, norm_type)
    expected = [torch.linalg.vector_norm(x.double(), norm_type) for x in views]
    powers = torch.stack([x.square() if norm_type == 2 else x for x in expected])
    torch.testing.assert_close(found[:-1], powers, rtol=1e-8, atol=0)
    assert found[-1] == 0
    for bad in (float("nan"), float("-inf")):
        views[1][40_000] = bad
        assert _powers(views, norm_type).isfinite().tolist() == [True, False, True, True, True]
