"""Statistics of tensors in parts: against torch on the whole, on every kind of placement."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kenotron_dist import Mesh, spawn
from kenotron_dist.boxes import local_boxes, local_shape
from kenotron_dist.hashing import key
from kenotron_dist.placement import Chunk, Shard, TensorLayout
from kenotron_dist.statistics import (
    checksum,
    merge,
    moments,
    no_moments,
    statistics_of,
    tensor_moments,
)

SHAPES = {"cut": (8, 6), "columns": (5, 12), "heads": (12, 3), "norm": (7,), "late": (4, 4)}


def whole(name: str) -> Tensor:
    """A tensor whose mean is large beside its spread, with zeros in it."""
    torch.manual_seed(len(name))
    x = 100.0 * len(name) + torch.randn(SHAPES[name])
    return x * (torch.rand(SHAPES[name]) > 0.1)


def expected(x: Tensor) -> dict[str, float]:
    x = x.double()
    std = x.std()
    return {
        "mean": x.mean().item(),
        "std": std.item(),
        "min": x.min().item(),
        "max": x.max().item(),
        "norm_l1": x.abs().sum().item(),
        "norm_l2": x.norm().item(),
        "zero_frac": (x == 0).double().mean().item(),
        "kurtosis": (((x - x.mean()) / std) ** 4).mean().item() - 3,
    }


def layouts(mesh: Mesh) -> dict[str, TensorLayout]:
    heads = Chunk(4, parts=2)
    placements = {
        "cut": (Shard("tp", 0, (Chunk(8, pad=8),)),),
        "columns": (Shard("tp", 1),),
        "heads": (Shard("tp", 0, (Chunk(8), heads)),),
    }
    last = mesh.sizes["pp"] - 1
    return {
        name: TensorLayout(
            name, shape, placements.get(name, ()), stages=(last,) if name == "late" else (0,)
        )
        for name, shape in SHAPES.items()
    }


def measure(mesh: Mesh, sliced: bool) -> dict[str, dict[str, Any]]:
    """Each rank builds its local tensors; padding holds what nobody may count."""
    held, found = {}, layouts(mesh)
    for name, layout in list(found.items()):
        if mesh.coords["pp"] not in layout.stages:
            continue
        local = torch.full(local_shape(layout, mesh.view(layout)), 1e6)
        for box in local_boxes(layout, mesh.view(layout)):
            box.of_local(local).copy_(box.of_global(whole(name)))
        if sliced:
            size = -(-local.numel() // mesh.sizes["dp"])
            start = min(size * mesh.coords["dp"], local.numel())
            stop = min(start + size, local.numel())
            found[name] = layout.sliced(start, stop)
            local = local.flatten()[start:stop]
        held[name] = local
    rows = tensor_moments(held, found, list(SHAPES), mesh).tolist()
    all_of_it = checksum({name: (each, found[name]) for name, each in held.items()}, mesh)
    return {n: dataclasses.asdict(statistics_of(r)) for n, r in zip(SHAPES, rows, strict=True)} | {
        "checksum": {"all": all_of_it}
    }


def summed(change: float = 0.0) -> str:
    """The checksum of whole tensors, in whole numbers of Python; one element may be another one."""
    parts: list[str | int] = []
    for name in sorted(SHAPES):
        x = whole(name)
        x.view(-1)[0] += change
        bits = x.view(torch.int32).flatten().tolist()
        parts += [name, sum((b ^ (b << 21)) * b + b for b in bits) % 2**64]
    return f"{key(*parts):032x}"


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize(
    "sizes", [{}, {"dp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}, {"dp": 3}], ids=str
)
def test_every_layout_has_the_statistics_of_the_whole(sizes: dict, sliced: bool) -> None:
    for found in spawn(measure, sliced, **sizes):
        for name in SHAPES:
            assert found[name] == pytest.approx(expected(whole(name)), rel=1e-9), name
        assert found["checksum"]["all"] == summed() != summed(1e-3)


def test_merging_does_not_lose_a_spread_beside_a_large_mean() -> None:
    x = 1e6 + torch.randn(1000, dtype=torch.float64)
    row = no_moments()
    for part in x.split([1, 299, 700]):
        row = merge(row, moments(part))
    assert dataclasses.asdict(statistics_of(row.tolist())) == pytest.approx(expected(x), rel=1e-6)


def test_a_tensor_in_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenotron_dist.statistics._CHUNK", 7)
    x = torch.arange(60.0).view(5, 12).t() / 7
    assert dataclasses.asdict(statistics_of(moments(x).tolist())) == pytest.approx(expected(x))


def test_no_element_one_element_and_equal_ones() -> None:
    empty = statistics_of(moments(torch.empty(0, 3)).tolist())
    assert (empty.mean, empty.zero_frac, empty.min) == (0.0, 1.0, 0.0)
    one = statistics_of(moments(torch.tensor(3.0)).tolist())
    assert (one.mean, one.std, one.kurtosis, one.norm_l2) == (3.0, 0.0, 0.0, 3.0)
    same = statistics_of(moments(torch.ones(9, dtype=torch.bfloat16)).tolist())
    assert (same.std, same.kurtosis, same.norm_l1, same.norm_l2) == (0.0, 0.0, 9.0, 3.0)


class HostCopies(TorchFunctionMode):
    """Names the calls that move values between host and device: each would stop a GPU's queue."""

    NAMES = ("tensor", "as_tensor", "item", "tolist", "cpu", "numpy", "nonzero", "to", "copy_")
    NAMES += ("__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in self.NAMES:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_no_value_moves_between_host_and_device() -> None:
    with HostCopies() as copies:
        moments(torch.empty(5, 1 << 22, device="meta"))  # five chunks
    assert copies.found == []


def test_the_recorder_sees_what_would_wait() -> None:
    with HostCopies() as copies:
        torch.tensor(1.0).to("meta")
        bool(torch.ones(()))
    assert copies.found == ["tensor", "to", "__bool__"]
