"""Memory of parameters that comes and goes (ZeRO-3; Rajbhandari et al., arXiv 1910.02054).

Between uses a parameter has no memory: its storage is empty, and what a rank owns is in its
masters, or, if it does not learn, in its frozen slices. Views, autograd's saved tensors and tied
leaves refer to the storage, which is filled with the same values again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from kenotron_dist import gather_pieces
from kenotron_optim.accumulate import GradAccumulator
from kenotron_optim.parameter_gather import Group, ParameterGathers, Pieces
from kenotron_optim.sliced_tensors import joined
from kenotron_optim.units import is_small


class ParameterMemory(ParameterGathers):
    """The memory of one stage's parameters, by groups: whole until the modules are named.

    Args:
        accumulator: has the parameters, frozen ones too, and their buckets.
        masters: fp32 values of what this rank owns, by (logical name, data rank).
    """

    by_module = True

    def __init__(
        self, accumulator: GradAccumulator, masters: Mapping[tuple[str, int], Tensor]
    ) -> None:
        super().__init__(accumulator, gathers=True)
        self._masters, self._frozen = masters, accumulator.frozen
        self._tensors = joined(accumulator, accumulator.frozen)
        self._there: set[int] = set()
        """Groups that have memory; those that fly are among them."""
        self._remains: set[int] = set()
        """Groups that were freed but for small parameters."""

    @property
    def sharded(self) -> bool:
        """True where parameters have no memory between uses."""
        return bool(self._readers)

    @property
    def whole(self) -> bool:
        """True where all parameters have memory now."""
        return not self.sharded or len(self._there) == len(self.groups)

    def overlap_forward(self, modules: Iterable[nn.Module]) -> None:
        """Group parameters by the module that reads them first; see ``SlicedOptimizer``."""
        for path, parameter in self._tensors.parameters.items():
            if parameter.untyped_storage().nbytes() not in (0, parameter.nbytes):
                raise ValueError(
                    f"parameter {path!r} is a part of a larger memory, which ZeRO stage 3 cannot "
                    "free: give it memory of its own, or choose stage 2"
                )
        super().overlap_forward(modules)
        self._frozen.take(span.name for group in self.groups for span in group)
        self._found = None  # of other groups
        self._pieces()
        self._there = set(range(len(self.groups)))

    @torch.no_grad()
    def fill(self, write: Callable[[nn.Module], None]) -> None:
        """Let each module have memory while it is written, and keep what this rank owns of it."""
        for module, groups in self._readers:
            for group in groups:  # with what was written before: a tied unit has others' parameters
                self._give_values(group)
            write(module)
            self._keep(groups)
            for group in groups:
                self._take_memory(self.groups[group])

    @torch.no_grad()
    def rewrite(self, write: Callable[[nn.Module], None]) -> None:
        """Gather each module's parameters while it is written, and keep what this rank owns."""
        for module, groups in self._readers:
            for group in groups:
                self._start(group)
            self.wait_for(groups)
            write(module)
            self._keep(groups)
            for group in groups:
                self._empty(group)

    def settle(self) -> None:
        """Wait for what is in flight; parameters that have no memory stay so."""
        self.wait_for(self._flying)

    def wait(self) -> None:
        """Make all parameters whole, until the next use of each is over or ``publish``."""
        for group in range(len(self.groups)) if self.sharded else ():
            self._start(group)
        self.wait_for(self._flying)

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
            spans = tuple(span for span in spans if not is_small(self._tensors.tensor(span.name)))
        else:
            self._remains.discard(group)
        self._take_memory(spans)

    def _give_values(self, group: int) -> None:
        """Give a group memory, and write what this rank owns of it."""
        self._give_memory(self.groups[group])
        for own, master in self._owned(group):
            own.copy_(master)

    def _keep(self, groups: Iterable[int]) -> None:
        """Take what this rank owns of groups, which have memory, as their values."""
        for group in groups:
            for own, master in self._owned(group):
                master.copy_(own)

    def _value(self, piece: tuple[str, int]) -> Tensor | None:
        """Return what this rank keeps of a parameter, if that has such a piece."""
        master = self._masters.get(piece)
        return self._frozen.values.get(piece) if master is None else master

    def _owned(self, group: int) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's part of each of a group's parameters, with what it keeps of it."""
        data, pieces = self._pieces()[group]
        return [
            (own, master.view(-1))
            for name, own in pieces[data.rank].items()
            if (master := self._value((name, data.rank))) is not None
        ]

    def _give_memory(self, group: Group) -> None:
        for span in group:
            parameter = self._tensors.tensor(span.name)
            parameter.untyped_storage().resize_(parameter.nbytes)

    def _take_memory(self, group: Group) -> None:
        for span in group:
            self._tensors.tensor(span.name).untyped_storage().resize_(0)

    def _pieces(self) -> list[Pieces]:
        """Ranges of storages, which stay the same when their memory goes and comes."""
        if self._found is None or self._found[0] is not self.groups:
            self._found = self.groups, self._find_pieces()
        return self._found[1]

    def _ranges(self, group: Group, ranks: int) -> list[dict[str, Tensor]]:
        """Views of storages, which must have memory while they are made."""
        hollow = [
            span for span in group if not self._tensors.tensor(span.name).untyped_storage().nbytes()
        ]
        self._give_memory(tuple(hollow))
        found = super()._ranges(group, ranks)
        self._take_memory(tuple(hollow))
        return found
