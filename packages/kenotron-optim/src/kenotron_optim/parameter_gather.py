"""All-gathers of updated parameters (ZeRO-1), waited for where a module first reads them.

An update ends with one all-gather for each group of parameters. They start in the order of the
forward, and travel behind the next one: a pre-hook on each module waits for what that module reads.
Hooks exist only while something is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kenotron_dist import Axis, Handle, gather_pieces
from kenotron_optim.accumulate import GradAccumulator
from kenotron_optim.checks import check_alike
from kenotron_optim.partition import Bucket, Span
from kenotron_optim.sliced_tensors import SlicedTensors

Group = tuple[Span, ...]
"""Parameters that are gathered together."""
Pieces = tuple[Axis, list[dict[str, Tensor]]]
"""The data axis of a group, and the ranges that each of its ranks owns."""


class ParameterGathers:
    """The all-gathers of one stage's parameters.

    Without ``overlap_forward`` they are waited for as soon as all have started.

    Args:
        accumulator: has the parameters and their buckets.
        gathers: whether data ranks have slices to gather (stage 1).
    """

    by_module = False
    """True where parameters of different modules are never gathered together."""

    def __init__(self, accumulator: GradAccumulator, *, gathers: bool) -> None:
        self._accumulator, self._gathers = accumulator, gathers
        self._tensors: SlicedTensors = accumulator
        self.groups: list[Group] = [bucket.spans for bucket in accumulator.buckets]
        """In the order in which their gathers start."""
        self._readers: list[tuple[nn.Module, list[int]]] = []
        """Modules in the order of the forward, and the groups that each one reads."""
        self._flying: dict[int, Handle] = {}
        self._found: tuple[Any, list[Pieces]] | None = None
        self._hooks: list[RemovableHandle] = []

    def overlap_forward(self, modules: Iterable[nn.Module]) -> None:
        """Wait for parameters in the next forward of ``modules``; see ``SlicedOptimizer``.

        Collective over the data axes: all data ranks give the same modules in the same order.

        Raises:
            ValueError: some parameter belongs to none of the modules, or data ranks differ; with
                ZeRO stage 3 also a second call.
        """
        if self.by_module and self._readers:
            raise ValueError(
                "overlap_forward: with ZeRO stage 3 the modules have been named, and parameters "
                "were cut by them: name all of them once"
            )
        self.wait()
        # Which module reads a parameter first.
        modules, accumulator = list(modules), self._accumulator
        names = [self._read_by(module) for module in modules]
        first = {name: i for i, read in reversed(list(enumerate(names))) for name in read}
        if missing := sorted(accumulator.logical.keys() - first.keys()):
            raise ValueError(
                f"parameters {', '.join(missing)} belong to none of the {len(modules)} modules "
                "given: give every module that reads parameters, in the order of the forward"
            )
        # Buckets are cut into groups that are gathered in the order in which they are read.
        cut = [
            group
            for bucket in self._tensors.buckets
            for group in _cut(bucket, first, by_module=self.by_module)
        ]
        self.groups = sorted(cut, key=lambda group: min(first[span.name] for span in group))
        check_alike([[span.name for span in group] for group in self.groups], accumulator.peers)
        # Every module waits for all groups that hold something it reads.
        held = [{span.name for span in group} for group in self.groups]
        self._readers = [
            (module, [i for i, group in enumerate(held) if group & read])
            for module, read in zip(modules, names, strict=True)
        ]

    @torch.no_grad()
    def publish(self, masters: Mapping[tuple[str, int], Tensor]) -> None:
        """Write masters, by (logical name, data rank), into the parameters and start the gathers.

        Masters are flat. While one group's slices travel, in place, the next one's are cast.
        """
        self.wait()
        for i, (data, pieces) in enumerate(self._pieces()):
            cast = [
                (range_, master)
                for rank, own in enumerate(pieces)
                for name, range_ in own.items()
                if (master := masters.get((name, rank))) is not None
                and master.data_ptr() != range_.data_ptr()
            ]
            if cast:
                torch._foreach_copy_([to for to, _ in cast], [master for _, master in cast])
            if self._gathers and data.size > 1:
                self._flying[i] = gather_pieces([list(own.values()) for own in pieces], data)
        self._hook_readers()

    def wait(self) -> None:
        """Wait until all parameters are complete; no-op where nothing is in flight."""
        self.land(list(self._flying))

    @property
    def whole(self) -> bool:
        """True where all parameters have memory."""
        return True

    def fill(self, write: Callable[[nn.Module], None]) -> None:
        """Give each module its first values, with ZeRO stage 3. Raises ValueError in others."""
        raise ValueError(
            "fill was given with a ZeRO stage below 3, whose masters are taken from the parameters "
            "when the optimizer is made: fill the modules before"
        )

    @torch.no_grad()
    def rewrite(self, write: Callable[[nn.Module], None]) -> None:
        """Let a function write into one module of ``overlap_forward`` after the other."""
        if not self._readers:
            raise RuntimeError("rewrite: call overlap_forward before, which names the modules")
        self.wait()
        for module, _ in self._readers:
            write(module)

    def settle(self) -> None:
        """Wait for everything in flight, before masters change."""
        self.wait()

    def _hook_readers(self) -> None:
        """All gathers have started: let modules wait for them.

        A module whose call is a program (``nn.Module.compile``) would have the hook in its program;
        what it reads is waited for now. So is everything without ``overlap_forward``.
        """
        if not self._readers:
            self.wait()
        for module, groups in self._readers:
            if getattr(module, "_compiled_call_impl", None) is not None:
                self.land(groups)
        for module, groups in self._readers:
            if any(group in self._flying for group in groups):
                hook = _BeforeForward(self, groups)
                self._hooks.append(module.register_forward_pre_hook(hook))

    def _pieces(self) -> list[Pieces]:
        """Those of each group; found again where parameters have moved."""
        places = [p.data_ptr() for p in self._accumulator.parameters.values()], self.groups
        if self._found is None or self._found[0] != places:
            self._found = places, self._find_pieces()
        return self._found[1]

    def _find_pieces(self) -> list[Pieces]:
        axes = [self._tensors.axis_of(group[0].name) for group in self.groups]
        return [
            (axis, self._ranges(group, axis.size))
            for axis, group in zip(axes, self.groups, strict=True)
        ]

    def _ranges(self, group: Group, ranks: int) -> list[dict[str, Tensor]]:
        """Return each data rank's parts of the parameters of a group, in place; may be empty."""
        found = dict[str, Sequence[Tensor]]()
        for span in group:
            ends = [span.owned(rank) for rank in range(ranks)]
            flat = self._tensors.tensor(span.name).data.view(-1)
            found[span.name] = flat.split([stop - start for start, stop in ends])
        return [{name: parts[rank] for name, parts in found.items()} for rank in range(ranks)]

    def land(self, groups: Iterable[int]) -> None:
        """Wait for some groups, in the order of their start; without any left, remove all hooks."""
        self.wait_for(groups)
        if not self._flying:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def wait_for(self, groups: Iterable[int]) -> None:
        """Wait for those of some groups that are in flight."""
        for group in list(groups):
            if group in self._flying:
                self._flying.pop(group).wait()

    @torch.no_grad()
    def complete_copies(self, memo: Mapping[int, Any]) -> None:
        """Wait for everything in flight; write it into the parameters that a deep copy has made.

        The hooks stay: who copies iterates over them.

        Args:
            memo: that of ``copy.deepcopy``, which has made copies of some parameters before.
        """
        self.wait_for(list(self._flying))
        for parameter in self._tensors.parameters.values():
            if (copied := memo.get(id(parameter))) is not None:
                copied.copy_(parameter)

    def _read_by(self, module: nn.Module) -> set[str]:
        """Logical names of the parameters of a module that are gathered."""
        own = {id(parameter) for parameter in module.parameters()}
        names, parameters = self._tensors.name_of, self._tensors.parameters
        return {names[path] for path, parameter in parameters.items() if id(parameter) in own}


class _BeforeForward:
    """Pre-hook of a module: waits for the groups of parameters that it reads.

    A deep copy waits for all, so that the copied model is complete, and has nothing to wait for.
    """

    def __init__(self, gathers: ParameterGathers, groups: list[int]) -> None:
        self._gathers, self._groups = gathers, groups

    def __call__(self, *_: Any) -> None:
        self._gathers.land(self._groups)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        self._gathers.complete_copies(memo)
        return _remove_from_copy


def _remove_from_copy(module: nn.Module, _: Any) -> None:
    """Pre-hook of a copied module: removes itself."""
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _remove_from_copy]:
        del hooks[key]


def _cut(bucket: Bucket, first: dict[str, int], *, by_module: bool) -> list[Group]:
    """A bucket as one group, or as a group for each module."""
    if not by_module:
        return [bucket.spans]
    groups: dict[int, list[Span]] = {}
    for span in bucket.spans:
        if span.name in first:  # a frozen parameter may be read by no module: it stays whole
            groups.setdefault(first[span.name], []).append(span)
    return [tuple(group) for group in groups.values()]


def listed(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return them as a list. Raises ValueError for a model that is none."""
    found = list(modules) if isinstance(modules, Iterable) else None
    if found is None or not all(isinstance(each, nn.Module) for each in found):
        raise ValueError(
            f"overlap_forward: {type(modules).__name__} is no list of modules: give all that have "
            "parameters, in the order of the forward, such as [model.embedding, *model.layers]"
        )
    return found


def check_whole(whole: bool) -> None:
    """Raise RuntimeError where values are to be read that have no memory."""
    if not whole:
        raise RuntimeError(
            "reload() with ZeRO stage 3: parameters have no memory; write into "
            "parameter_slices(), or call wait_for_parameters() and change them"
        )
