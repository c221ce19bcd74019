"""Placements of every kind of block, judged by ``spmd_types``, and what it sees of faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import torch
from placement_types import SPECS, Type, decoder_gradients, loss_type
from spmd_types import I, R, SpmdTypeError, V

from kenotron_dist import Axis, Mesh
from kenotron_dist.autograd import copy_to, gather_from, reduce_from, scatter_to
from kenotron_dist.testing import on_ranks
from kenotron_models import with_values

KINDS = sorted(SPECS.keys() - {"blocked"})  # the kernel of "blocked" does not run on meta
ROUTED = [name for name in KINDS if SPECS[name].routes]
LAYOUTS = [{"cp": 2, "tp": 2}, {"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}]
Patch = AbstractContextManager[Any]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_every_kind_of_block_has_types(sizes: dict[str, int]) -> None:
    for name in ROUTED if "ep" in sizes else KINDS:
        for mode in ("plain", "sequence") if "tp" in sizes else ("plain",):
            found = loss_type(name, mode, **sizes)
            assert found.pop("tp", I) is I, (name, mode)
            # Losses of routers are already summed over cp.
            assert all(kind is V or kind == {V, I} for kind in found.values()), (name, mode)


def replaced(path: str, other: Type, at: str, kind: Type) -> Type:
    """Another type for one parameter."""
    return other if at == path else kind


@pytest.mark.parametrize("mode", ["plain", "sequence"])
def test_no_sum_of_a_gradient_is_missing_or_too_much(mode: str) -> None:
    """Each parameter of the first block, or of none, in turn: whole gradients, or partial ones."""
    for name in ("all", "experts", "latent", "mamba2-one-group", "places"):
        kinds: dict[str, Type] = {}
        loss_type(name, mode, kinds.setdefault, tp=2)
        for path, kind in kinds.items():
            ((axis, found),) = kind.items()
            if found is V or any(f".{n}." in path for n in (1, 2, 3)):
                continue
            other = {axis: R if found is I else I}
            with pytest.raises(SpmdTypeError):
                loss_type(name, mode, partial(replaced, path, other), tp=2)


def without(place: str, *names: str) -> Callable[[], Patch]:
    """Modules of a class that do not declare that gradients of parameters are partial."""
    module = resolve_name(f"kenotron_models.{place}")
    init = module.__init__

    def forgetful(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        for name in names:
            self.placements.pop(name, None)

    return lambda: mock.patch.object(module, "__init__", forgetful)


def instead(place: str, function: Callable[..., Any]) -> Callable[[], Patch]:
    """Another function at a place."""
    return lambda: mock.patch(f"kenotron_{place}", function)


def alone(x: torch.Tensor, axis: Axis, *_: Any) -> torch.Tensor:
    """No communication."""
    return x


def twice(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A sum that is summed once more."""
    return reduce_from(reduce_from(x, axis), axis)


def bias_of_each_rank() -> Patch:
    """A row product whose bias each rank adds once more."""
    row_product = resolve_name("kenotron_tp.matmul:_RowProduct")
    forward = row_product.forward

    def added(ctx: Any, x: Any, weight: Any, bias: Any, call: Any) -> torch.Tensor:
        y = forward(ctx, x, weight, bias, call)
        return y if bias is None else y + bias

    return mock.patch.object(row_product, "forward", staticmethod(added))


def own_gradient(dy: Any, weight: Any, how: Any, n: int) -> Any:
    """Gradient of a column product's input, of this rank's columns alone."""
    dx = dy @ weight
    return mock.Mock(wait=lambda: dx)


def experts_of_all() -> Patch:
    """Gradients of a rank's own experts are added to those of other ranks' experts."""
    linear = resolve_name("kenotron_models.stacked_linear:StackedLinear")
    init, forward = linear.__init__, linear.forward

    def remembers(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.axis = given[3].ep

    def summed(self: Any, *given: Any, **named: Any) -> torch.Tensor:
        weight = copy_to(self.weight, self.axis)
        return forward(with_values(self, {"weight": weight}), *given, **named)

    return mock.patch.multiple(linear, __init__=remembers, forward=summed)


def whole_head() -> Patch:
    """The logits of the whole vocabulary on each rank, for a loss of a part of it."""
    head = resolve_name("kenotron_models.decoder:Head")
    forward = head.forward

    def gathered(self: Any, *given: Any, **named: Any) -> torch.Tensor:
        return gather_from(forward(self, *given, **named), self.axis, -1)

    return mock.patch.object(head, "forward", gathered)


def keys_left_behind() -> Patch:
    """Gradients of keys that other ranks of cp computed do not come back."""
    returned = resolve_name("kenotron_cp.returned_gradients:Returned")

    def lost(self: Any, work: Any) -> None:
        for (m, x), row in zip(self.names, self.handle.wait().unbind(), strict=True):
            work.keep(m, x, torch.zeros_like(row))

    return mock.patch.object(returned, "keep", lost)


FAULTS: dict[str, tuple[str, str, Callable[[], Patch], bool]] = {
    "norm: no sum over tokens": ("all", "sequence", without("norm:RMSNorm", "weight"), True),
    "learned places: no sum": (
        "places", "sequence", without("embedding:Embedding", "positions"), True,
    ),
    "router: no sum": ("experts", "sequence", without("router:Router", "weight"), True),
    "gate of shared experts: no sum": (
        "experts", "sequence", without("shared_gate:SharedGate", "weight"), True,
    ),
    "latent: no sum": (
        "latent", "sequence", without("latent_attention:WholeLinear", "weight"), True,
    ),
    "embedding: not added": ("all", "plain", instead("tp.embedding.reduce_from", alone), True),
    "embedding: added twice": ("all", "plain", instead("tp.embedding.reduce_from", twice), True),
    "embedding: cut, not added": (
        "all", "sequence",
        instead("tp.embedding.reduce_scatter_to", lambda x, axis: scatter_to(x, axis, 0)), True,
    ),
    "Mamba: no copy": ("mamba", "plain", instead("models.mamba.copy_to", alone), True),
    "norm of shared groups: no copy": (
        "mamba2-one-group", "plain", instead("models.gated_norm.copy_to", alone), True,
    ),
    "latent keys: no copy": (
        "latent", "plain", instead("models.latent_attention.copy_to", alone), True,
    ),
    "latent keys: own gradient": (
        "latent", "sequence",
        instead("models.latent_attention.all_gather_from", lambda x, a: gather_from(x, a, 0)), True,
    ),
    "row product: bias of each rank": ("all", "plain", bias_of_each_rank, False),
    "column product: own gradient": (
        "all", "plain", instead("tp.matmul._start_input_gradient", own_gradient), False,
    ),
    "head: whole on each rank": ("all", "plain", whole_head, True),
    "experts: gradients of all": ("experts", "plain", experts_of_all, True),
    "keys over cp: left behind": ("all", "plain", keys_left_behind, False),
}  # fmt: skip
"""Kind of block, mode, what is wrong, and whether types see it: they do not look into functions
with a backward of their own."""
OTHER_AXES = {
    "experts: gradients of all": {"tp": 2, "ep": 2},
    "keys over cp: left behind": {"cp": 2},
}
"""Layouts of faults that are none of tp."""


def departures(mesh: Mesh, faults: list[str]) -> list[float]:
    """Largest difference of each fault's loss or gradients from those without it."""
    sound: dict[tuple[str, str], Any] = {}
    found = []
    for name, mode, fault, _ in (FAULTS[each] for each in faults):
        if (name, mode) not in sound:
            sound[name, mode] = decoder_gradients.gradients_fp64(mesh, name, mode)
        loss, _, parts = sound[name, mode]
        with fault():
            wrong, _, wrong_parts = decoder_gradients.gradients_fp64(mesh, name, mode)
        worst = abs(loss - wrong)
        for path, pieces in parts.items():
            for (_, values), (_, others) in zip(pieces, wrong_parts[path], strict=True):
                worst = max(worst, float((values - others).abs().max()))
        found.append(worst)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_types_see_a_fault_of_placement(fault: str) -> None:
    name, mode, wrong, seen = FAULTS[fault]
    sizes = OTHER_AXES.get(fault, {"tp": 2})
    loss_type(name, mode, **sizes)
    with wrong():
        if not seen:
            loss_type(name, mode, **sizes)
            return
        with pytest.raises(SpmdTypeError):
            loss_type(name, mode, **sizes)


@pytest.mark.parametrize("sizes", [{"tp": 2}, *OTHER_AXES.values()], ids=str)
def test_numbers_see_all_faults_of_placement(sizes: dict[str, int]) -> None:
    faults = [name for name in FAULTS if OTHER_AXES.get(name, {"tp": 2}) == sizes]
    found = on_ranks(departures, faults, **sizes)
    for name, *worst in zip(faults, *found, strict=True):
        assert max(worst) > 1e-6, name
