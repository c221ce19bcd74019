"""Units of ZeRO-3: parameters have memory where a unit of the forward uses them.

A unit, a module of the forward, gathers its parameters before its forward and again before its
backward, while the unit before it computes, and frees them after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from kenotron_dist.weight_products import current_backward
from kenotron_optim.accumulate import GradAccumulator
from kenotron_optim.config import Regather
from kenotron_optim.late_reads import is_read_later
from kenotron_optim.parameter_memory import ParameterMemory
from kenotron_optim.units import (
    GradientCalls,
    Once,
    Unit,
    UnitHook,
    has_memory,
    is_opaque,
    no_leaf,
)


class ParameterShards(ParameterMemory):
    """The parameters of one stage: whole until ``overlap_forward`` names the units.

    Args:
        accumulator: has the parameters and their buckets; tells which gradients have come.
        regather: when units are freed.
        masters: fp32 values of what this rank owns, by (logical name, data rank).
    """

    def __init__(
        self,
        accumulator: GradAccumulator,
        regather: Regather,
        masters: Mapping[tuple[str, int], Tensor],
    ) -> None:
        super().__init__(accumulator, masters)
        self._regather = regather
        self._units: list[Unit] = []
        self._units_of: dict[str, list[Unit]] = {}
        """Those that a parameter is in."""
        self._held: list[int] = []
        """Uses of each group that are not over."""
        self._gradients = GradientCalls()
        self._storages: set[int] = set()
        """Of parameters, which stay the same while their memory comes and goes."""

    def overlap_forward(self, modules: Iterable[nn.Module]) -> None:
        """Make units of the modules and free all parameters; see ``SlicedOptimizer``."""
        modules = list(modules)
        for module in modules:
            if getattr(module, "_compiled_call_impl", None) is not None:
                raise ValueError(
                    f"{type(module).__name__}.compile() makes hooks a part of the program, and "
                    "ZeRO stage 3 gathers in hooks: compile its submodules, or choose stage 2"
                )
        super().overlap_forward(modules)
        self._held = [0] * len(self.groups)
        held, learning = self._tensors.parameters, self._accumulator.parameters
        self._storages = {p.untyped_storage()._cdata for p in held.values()}
        for place, (module, groups) in enumerate(self._readers):
            own = {id(parameter) for parameter in module.parameters()}
            paths = frozenset(path for path, p in held.items() if id(p) in own)
            unit = Unit(place, groups, paths & learning.keys(), paths)
            self._units.append(unit)
            for path in unit.paths:
                self._units_of.setdefault(path, []).append(unit)
            module.register_forward_pre_hook(UnitHook(self._before_forward, unit))
            after = UnitHook(self._after_forward, unit)  # also after an exception, without output
            module.register_forward_hook(after, with_kwargs=True, always_call=True)
            module.register_state_dict_pre_hook(UnitHook(self._before_state_dict, unit))
            module.register_load_state_dict_pre_hook(UnitHook(self._before_state_dict, unit))
        self._accumulator.watch(weakref.WeakMethod(self._got_gradient))
        self.publish(self._masters)

    def publish(self, masters: Mapping[tuple[str, int], Tensor]) -> None:
        """Take other flat masters, by (logical name, data rank); the next uses gather them."""
        self._masters = masters
        if self.sharded:
            self.free()
        else:
            super().publish(masters)

    def free(self) -> None:
        """Free all parameters and forget uses that are not over."""
        self.wait_for(self._flying)
        self._held = [0] * len(self.groups)
        for unit in self._units:
            unit.left, unit.waiting = set(), 0
        for group in self._there | self._remains:
            self._empty(group)

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any) -> Any:
        # One that is computed again within a backward is followed by no forward.
        self._enter(unit, unit.place + 1 if current_backward() < 0 else -1)
        return tree_map_only(Tensor, no_leaf, args) if torch.is_grad_enabled() else None

    def _after_forward(
        self, unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        leaves = tree_leaves(output)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        hides = torch.is_grad_enabled() and any(map(is_opaque, leaves))
        differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if torch.is_grad_enabled():
            unit.differentiates = differentiates or hides
        inputs = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.requires_grad]
        if hides or is_read_later(module, args, kwargs, tensors, self._storages):
            if unit.paths and (differentiates or hides):
                self._await_gradients(unit)
            elif unit.groups and differentiates and len(inputs) == 1:  # a head that is frozen
                unit.waiting += 1
                self._gradients.call(inputs[0], partial(self._after_backward, unit), first=True)
            return
        if differentiates:
            unit.by_input = len(inputs) == 1 and bool(unit.groups)
            for x in inputs if unit.by_input else ():
                self._gradients.call(x, partial(self._after_backward, unit), first=True)
            once = Once(partial(self._before_backward, unit))
            for x in tensors:
                if x.requires_grad:
                    self._gradients.call(x, once)
        self._leave(unit)

    def _before_state_dict(self, unit: Unit, *_: Any) -> None:
        held = self._tensors.parameters
        hollow = [path for path in sorted(unit.held) if not has_memory(held[path])]
        if hollow:
            raise RuntimeError(
                f"state_dict with ZeRO stage 3: parameter {hollow[0]!r} has no memory; call "
                "wait_for_parameters() before, and reload() after load_state_dict()"
            )

    def _before_backward(self, unit: Unit) -> None:
        unit.learned = set()
        if unit.by_input:
            unit.waiting += 1
        elif unit.paths:
            self._await_gradients(unit)
        if unit.groups:
            before = self._units[unit.place - 1] if unit.place else unit
            self._enter(unit, before.place if before.differentiates else -1)

    def _after_backward(self, unit: Unit) -> None:
        if unit.waiting:
            unit.waiting -= 1
            self._leave(unit, keeps_small=not unit.paths <= unit.learned)

    def _await_gradients(self, unit: Unit) -> None:
        unit.left = unit.left or set(unit.paths)
        unit.waiting += 1

    def _got_gradient(self, path: str) -> None:
        """A unit whose parameters all have a gradient is done with its backward."""
        for unit in self._units_of.get(path, ()):
            unit.learned.add(path)
            if unit.waiting and not unit.by_input and path in unit.left:
                unit.left.discard(path)
                if not unit.left:
                    unit.waiting -= 1
                    unit.left = set(unit.paths) if unit.waiting else set()
                    self._leave(unit)

    def _enter(self, unit: Unit, following: int) -> None:
        """Wait for a unit's parameters, and start gathering those of the next one."""
        for group in unit.groups:
            self._held[group] += 1
            self._start(group)
        self.wait_for(unit.groups)
        if 0 <= following < len(self._units):
            for group in self._units[following].groups:
                self._start(group)

    def _leave(self, unit: Unit, *, keeps_small: bool = False) -> None:
        for group in unit.groups:
            self._held[group] = max(self._held[group] - 1, 0)
            if not self._held[group] and self._regather == "layer":
                # Products of earlier micro-batches may still read what remains.
                self._empty(group, keeps_small=keeps_small or group in self._remains)
