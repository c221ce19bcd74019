"""Parameters that exist where they are used (ZeRO-3; Rajbhandari et al., arXiv 1910.02054).

Between uses a parameter has no memory: its storage is empty, and what a rank owns is in its
masters. A unit, a module of the forward, gathers its parameters before its forward and again
before its backward, while the unit before it computes, and frees them after it. Views, autograd's
saved tensors and tied leaves refer to the storage, which is filled with the same values again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from kenotron_dist import gather_pieces
from kenotron_dist.weight_products import current_backward
from kenotron_optim.accumulate import GradAccumulator
from kenotron_optim.config import Regather
from kenotron_optim.late_reads import is_read_later
from kenotron_optim.parameter_gather import Group, ParameterGathers, Pieces
from kenotron_optim.units import (
    GradientCalls,
    Once,
    Unit,
    UnitHook,
    has_memory,
    is_opaque,
    is_small,
    no_leaf,
)


class ParameterShards(ParameterGathers):
    """The parameters of one stage: whole until ``overlap_forward`` names the units.

    Args:
        accumulator: has the parameters and their buckets; tells which gradients have come.
        regather: when units are freed.
        masters: fp32 values of what this rank owns, by (logical name, data rank).
    """

    by_module = True

    def __init__(
        self,
        accumulator: GradAccumulator,
        regather: Regather,
        masters: Mapping[tuple[str, int], Tensor],
    ) -> None:
        super().__init__(accumulator, gathers=True)
        self._regather, self._masters = regather, masters
        self._units: list[Unit] = []
        self._units_of: dict[str, list[Unit]] = {}
        """Those that a parameter is in."""
        self._held: list[int] = []
        """Uses of each group that are not over."""
        self._gradients = GradientCalls()
        self._storages: set[int] = set()
        """Of parameters, which stay the same while their memory comes and goes."""
        self._there: set[int] = set()
        """Groups that have memory; those that fly are among them."""
        self._remains: set[int] = set()
        """Groups that were freed but for small parameters."""

    @property
    def sharded(self) -> bool:
        """True where parameters have no memory between uses."""
        return bool(self._units)

    @property
    def whole(self) -> bool:
        """True where all parameters have memory now."""
        return len(self._there) == len(self._held)

    def overlap_forward(self, modules: Iterable[nn.Module]) -> None:
        """Make units of the modules and free all parameters; see ``SlicedOptimizer``."""
        modules = list(modules)
        for module in modules:
            if getattr(module, "_compiled_call_impl", None) is not None:
                raise ValueError(
                    f"{type(module).__name__}.compile() makes hooks a part of the program, and "
                    "ZeRO stage 3 gathers in hooks: compile its submodules, or choose stage 2"
                )
        for path, parameter in self._accumulator.parameters.items():
            if parameter.untyped_storage().nbytes() not in (0, parameter.nbytes):
                raise ValueError(
                    f"parameter {path!r} is a part of a larger memory, which ZeRO stage 3 cannot "
                    "free: give it memory of its own, or choose stage 2"
                )
        super().overlap_forward(modules)
        self._found = None  # of other groups
        self._pieces()
        self._held, self._there = [0] * len(self.groups), set(range(len(self.groups)))
        paths = self._accumulator.parameters
        self._storages = {p.untyped_storage()._cdata for p in paths.values()}
        for place, (module, groups) in enumerate(self._readers):
            own = {id(parameter) for parameter in module.parameters()}
            unit = Unit(place, groups, frozenset(p for p, x in paths.items() if id(x) in own))
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

    @torch.no_grad()
    def fill(self, write: Callable[[nn.Module], None]) -> None:
        """Let each unit have memory while it is written, and keep what this rank owns of it."""
        for module, groups in self._readers:
            for group in groups:  # with what was written before: a tied unit has others' parameters
                self._give_values(group)
            write(module)
            for group in groups:
                for own, master in self._owned(group):
                    master.copy_(own)
                self._take_memory(self.groups[group])

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

    def settle(self) -> None:
        """Wait for what is in flight; parameters that have no memory stay so."""
        self.wait_for(self._flying)

    def wait(self) -> None:
        """Make all parameters whole, until the next use of each is over or ``publish``."""
        for group in range(len(self.groups)) if self.sharded else ():
            self._start(group)
        self.wait_for(self._flying)

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
        if hides or is_read_later(module, args, kwargs, tensors, self._storages):
            differentiates |= hides
            self._await_gradients(unit) if differentiates else None
            return
        if differentiates:
            inputs = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.requires_grad]
            unit.by_input = len(inputs) == 1 and bool(unit.paths)
            for x in inputs if unit.by_input else ():
                self._gradients.call(x, partial(self._after_backward, unit), first=True)
            once = Once(partial(self._before_backward, unit))
            for x in tensors:
                if x.requires_grad:
                    self._gradients.call(x, once)
        self._leave(unit)

    def _before_state_dict(self, unit: Unit, *_: Any) -> None:
        paths = self._accumulator.parameters
        hollow = [path for path in sorted(unit.paths) if not has_memory(paths[path])]
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
        if unit.paths:
            self._enter(unit, unit.place - 1)

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

    @torch.no_grad()
    def _start(self, group: int) -> None:
        """Start the all-gather of a group."""
        if group in self._there:
            return
        self._there.add(group)
        self._give_values(group)
        data, pieces = self._pieces()[group]
        if data.size > 1:
            self._flying[group] = gather_pieces([list(each.values()) for each in pieces], data)

    def _empty(self, group: int, *, keeps_small: bool = False) -> None:
        self.wait_for([group])
        self._there.discard(group)
        spans = self.groups[group]
        if keeps_small:
            self._remains.add(group)
            spans = tuple(span for span in spans if not is_small(self._parameter(span.name)))
        else:
            self._remains.discard(group)
        self._take_memory(spans)

    def _give_values(self, group: int) -> None:
        """Give a group memory, and write what this rank owns of it."""
        self._give_memory(self.groups[group])
        for own, master in self._owned(group):
            own.copy_(master)

    def _owned(self, group: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's part of each of a group's parameters, with its master."""
        data, pieces = self._pieces()[group]
        return [
            (own, master.view(-1))
            for name, own in pieces[data.rank].items()
            if (master := self._masters.get((name, data.rank))) is not None
        ]

    def _give_memory(self, group: Group) -> None:
        for span in group:
            parameter = self._parameter(span.name)
            parameter.untyped_storage().resize_(parameter.nbytes)

    def _take_memory(self, group: Group) -> None:
        for span in group:
            self._parameter(span.name).untyped_storage().resize_(0)

    def _pieces(self) -> list[Pieces]:
        """Ranges of storages, which stay the same when their memory goes and comes."""
        if self._found is None or self._found[0] is not self.groups:
            self._found = self.groups, self._find_pieces()
        return self._found[1]

    def _ranges(self, group: Group, ranks: int) -> list[dict[str, Tensor]]:
        """Views of storages, which must have memory while they are made."""
        hollow = [
            span for span in group if not self._parameter(span.name).untyped_storage().nbytes()
        ]
        self._give_memory(tuple(hollow))
        found = super()._ranges(group, ranks)
        self._take_memory(tuple(hollow))
        return found

    def _parameter(self, name: str) -> nn.Parameter:
        return self._accumulator.parameters[self._accumulator.logical[name]]
