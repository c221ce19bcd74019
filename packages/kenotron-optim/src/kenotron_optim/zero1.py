"""An optimizer over slices: fp32 masters and state for what a rank owns (ZeRO-1, arXiv 1910.02054).

Stage 0 keeps every data rank's slices on every rank, stage 1 only its own. Both take the same
reduction and update slices of the same length, so they agree bit for bit; stage 0 gathers
gradients, stage 1 gathers updated parameters. The master of an fp32 parameter is the parameter's
own memory; others have a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kenotron_dist import TensorLayout, gather_pieces, gather_rows
from kenotron_optim.accumulate import GradAccumulator, Slices
from kenotron_optim.groups import ParameterGroup
from kenotron_optim.partition import Bucket, Span

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizers]
"""Parameter groups -> ``torch.optim`` optimizers that share them out: elementwise ones for slices,
any for groups that are marked ``whole``, whose tensors have the parameters' own shapes."""

Piece = tuple[str, int]
"""(logical name, data rank whose slice it is)"""


class SlicedOptimizer:
    """Steps ``make_optimizer``'s optimizer on fp32 masters of parameter slices.

    Arguments:
        accumulator: has the parameters, their layouts and buckets.
        make_optimizer: builds the update rule; its state must have the shape of what it updates.
        groups: options by logical name; names of other stages are passed over.
        stage: 0 or 1 (see above).

    Raises ValueError for another stage, a parameter of this stage that is in no group or in two,
    and a name that the model has not.
    """

    def __init__(
        self,
        accumulator: GradAccumulator,
        make_optimizer: MakeOptimizer,
        groups: Sequence[ParameterGroup],
        stage: int = 1,
    ) -> None:
        if stage not in (0, 1):
            raise ValueError(f"ZeRO stage {stage} is not available: choose 0 or 1")
        self._accumulator, self._data, self.stage = accumulator, accumulator.data, stage
        held = [self._data.rank] if stage else range(self._data.size)
        self.masters: dict[Piece, Tensor] = {
            (span.name, rank): self._slice(span, rank)
            for _, span in accumulator.spans()
            for rank in held
            if span.owned(rank)[0] < span.owned(rank)[1]
        }
        whole = {span.name for _, span in accumulator.spans() if span.owner is not None}
        _check_names(groups, accumulator.names)
        options = _options(groups, self.masters, whole)
        # A rank may own nothing: few small parameters on many data ranks.
        made = make_optimizer(options) if options else []
        self._inner = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        self._steps, self._prepared = 0, False

    def step(self, slices: Slices, lr: float) -> None:
        """Update masters with gradient ``slices`` and parameters with masters.

        Collective over dp and cp. ``lr`` is multiplied by each group's factor. Raises ValueError
        for a rate that is negative or not finite.
        """
        if not 0 <= lr < float("inf"):
            raise ValueError(f"lr {lr} must be finite and not negative")
        whole = self.stage == 0 and self._data.size > 1
        gradients = self._gather_gradients(slices) if whole else None
        for (name, rank), master in self.masters.items():
            gradient = slices[name] if gradients is None else gradients[name, rank]
            master.grad = gradient.view_as(master)
        self._update(lr)
        self._steps += 1
        for master in self.masters.values():
            master.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters into the parameters, cast to their dtype. Collective under stage 1.

        While one bucket's slices travel, in place, the next one's are cast.
        """
        handles = []
        for bucket in self._accumulator.buckets:
            pieces = [self._ranges(bucket, rank) for rank in range(self._data.size)]
            for rank, own in enumerate(pieces):
                for name, range_ in own.items():
                    master = self.masters.get((name, rank))
                    if master is not None and master.data_ptr() != range_.data_ptr():
                        range_.copy_(master.view(-1))
            if self.stage:
                handles.append(gather_pieces([list(own.values()) for own in pieces], self._data))
        for handle in handles:
            handle.wait()

    def state(self) -> dict[str, tuple[Tensor, TensorLayout]]:
        """This rank's own slices as logical tensors, by name, and their layouts.

        ``optimizer.master.<parameter>`` and ``optimizer.<state>.<parameter>``, all fp32: the same
        records for stages 0 and 1. The tensors are the live ones, not copies.
        """
        found = {}
        for kind, (name, rank), tensor in self._tensors():
            if rank == self._data.rank:
                layout = self._layout(kind, name, rank)
                found[layout.name] = (tensor, layout)
        return found

    def wanted(self, *, started: bool = True) -> dict[str, tuple[Tensor, TensorLayout]]:
        """Every slice this rank holds, to be overwritten when state is loaded, by a unique key.

        State that torch would create in its first update is created now, all zero, unless the run
        that saved it had not ``started``; what there is already is then zero. After writing, set
        ``steps`` and call ``publish``. Read parameters before: an fp32 one shares its memory with
        its master.
        """
        if started and not (self._steps or self._prepared):
            self.prepare()
        found = {}
        for kind, (name, rank), tensor in self._tensors():
            if started or kind == "master":
                layout = self._layout(kind, name, rank)
                found[f"{kind}.{name}.{rank}"] = (tensor, layout)
            else:
                tensor.zero_()
        return found

    def reload(self) -> None:
        """Take the parameters' values as masters (after loading parameters alone)."""
        for _, span in self._accumulator.spans():
            for rank in range(self._data.size):
                if (span.name, rank) in self.masters:
                    master = self.masters[span.name, rank].data
                    master.copy_(self._slice(span, rank).detach())

    def prepare(self) -> None:
        """Create the inner optimizer's state, which torch does in its first update, all zero.

        That update is taken back. Write loaded values into ``wanted()`` and ``steps`` afterwards.
        """
        self._prepared = True
        before = [master.detach().clone() for master in self.masters.values()]
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        self._update(0.0)
        for master, value in zip(self.masters.values(), before, strict=True):
            master.data.copy_(value)
            master.grad = None
            for entry in self._state(master).values():
                if isinstance(entry, Tensor):
                    entry.zero_()

    @property
    def steps(self) -> int:
        """Updates made so far, those before a resume included."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        for master in self.masters.values():
            if "step" in (state := self._state(master)):
                state["step"].fill_(float(steps))

    def _update(self, lr: float) -> None:
        for optimizer in self._inner:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_multiplier"]
            optimizer.step()

    def _state(self, master: Tensor) -> dict[str, Any]:
        return next((each.state[master] for each in self._inner if master in each.state), {})

    def _tensors(self) -> Iterable[tuple[str, Piece, Tensor]]:
        for piece, master in self.masters.items():
            yield "master", piece, master.detach().view(-1)
            for key, entry in self._state(master).items():
                if isinstance(entry, Tensor) and entry.shape == master.shape and key != "step":
                    yield key, piece, entry.view(-1)

    def _layout(self, kind: str, name: str, rank: int) -> TensorLayout:
        return self._accumulator.owned_layout(name, rank).renamed(f"optimizer.{kind}.{name}")

    def _slice(self, span: Span, rank: int) -> Tensor:
        """A leaf with what a rank owns, in fp32: where the parameter is, if it has that dtype."""
        parameter = self._parameter(span.name).detach()
        if span.owner is None:
            start, stop = span.owned(rank)
            parameter = parameter.view(-1)[start:stop]
        return parameter.float().requires_grad_()

    def _ranges(self, bucket: Bucket, rank: int) -> dict[str, Tensor]:
        """What a data rank owns of the parameters of a bucket, where they are; not empty."""
        found = {}
        for span in bucket.spans:
            start, stop = span.owned(rank)
            if start < stop:
                found[span.name] = self._parameter(span.name).data.view(-1)[start:stop]
        return found

    def _gather_gradients(self, slices: Slices) -> dict[Piece, Tensor]:
        """Every data rank's slices, gathered where they were added up."""
        found: dict[Piece, Tensor] = {}
        handles = []
        for bucket, rows in zip(self._accumulator.buckets, self._accumulator.buffers, strict=True):
            if rows.dtype != torch.float32:
                rows = bucket.buffer(torch.float32, rows.device)
            for span in bucket.spans:
                slice_ = slices[span.name]
                place = rows[self._data.rank, span.offset : span.offset + slice_.numel()]
                if place.data_ptr() != slice_.data_ptr():
                    place.copy_(slice_)
                for rank in range(self._data.size):
                    start, stop = span.owned(rank)
                    found[span.name, rank] = rows[rank, span.offset : span.offset + stop - start]
            handles.append(gather_rows(rows, self._data))
        for handle in handles:
            handle.wait()
        return found

    def _parameter(self, name: str) -> Tensor:
        return self._accumulator.parameters[self._accumulator.logical[name]]


def _check_names(groups: Sequence[ParameterGroup], names: Collection[str]) -> None:
    given = [name for group in groups for name in group.names]
    strange = sorted(set(given) - set(names))
    if strange:
        raise ValueError(f"groups name parameters {strange} that the model has not")
    twice = sorted(name for name, times in Counter(given).items() if times > 1)
    if twice:
        raise ValueError(f"parameters {twice} are in two groups: a parameter has one")


def _options(
    groups: Sequence[ParameterGroup], masters: Mapping[Piece, Tensor], whole: Collection[str]
) -> list[dict[str, Any]]:
    """torch parameter groups over the masters, each piece in the group of its name."""
    pieces: dict[str, list[Tensor]] = {}
    for (name, _), master in masters.items():
        pieces.setdefault(name, []).append(master)
    options = []
    for group in groups:
        for uncut in (False, True):
            names = [name for name in group.names if (name in whole) is uncut]
            own = [master for name in names for master in pieces.pop(name, [])]
            if own:
                options.append(
                    {
                        "params": own,
                        "weight_decay": group.weight_decay,
                        "lr_multiplier": group.lr_multiplier,  # torch keeps keys of others
                        "whole": uncut,
                    }
                )
    if pieces:
        raise ValueError(f"parameters {sorted(pieces)} are in no group: every one needs options")
    return options
