"""An optimizer over slices: fp32 masters and state for what a rank owns (ZeRO-1, arXiv 1910.02054).

Stage 0 keeps every data rank's slices on every rank, stage 1 only its own. Both take the same
reduction and update slices of the same length, so they agree bit for bit; stage 0 gathers
gradients, stage 1 gathers updated parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kenotron_dist import TensorLayout, all_gather
from kenotron_optim.accumulate import GradAccumulator, Slices
from kenotron_optim.groups import ParameterGroup
from kenotron_optim.partition import Bucket, Span, read

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Parameter groups -> any elementwise ``torch.optim`` optimizer over them."""

Piece = tuple[str, int]
"""(logical name, data rank whose slice it is)"""


class SlicedOptimizer:
    """Steps ``make_optimizer``'s optimizer on fp32 masters of parameter slices.

    Arguments:
        accumulator: has the parameters, their layouts and buckets.
        make_optimizer: builds the update rule; its state must have the shape of what it updates.
        groups: options by logical name; names of other stages are passed over.
        stage: 0 or 1 (see above).

    Raises ValueError for another stage, or a parameter of this stage that is in no group.
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
        options = _options(groups, self.masters)
        # A rank may own nothing: few small parameters on many data ranks.
        self._inner = make_optimizer(options) if options else None
        self._steps = 0

    def step(self, slices: Slices, lr: float) -> None:
        """Update masters with gradient ``slices`` and parameters with masters.

        Collective over dp and cp. ``lr`` is the learning rate of all groups.
        """
        whole = self.stage == 0 and self._data.size > 1
        gradients = self._gather_gradients(slices) if whole else None
        for (name, rank), master in self.masters.items():
            master.grad = slices[name] if gradients is None else gradients[name, rank]
        self._update(lr)
        self._steps += 1
        for master in self.masters.values():
            master.grad = None
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Write the masters into the parameters, cast to their dtype. Collective under stage 1."""
        data, buckets = self._data, self._accumulator.buckets
        if self.stage == 0 or data.size == 1:
            self._copy_masters()
            return
        own = [self._filled(bucket) for bucket in buckets]
        handles = [all_gather(row, data, async_op=True) for row in own]
        for bucket, handle in zip(buckets, handles, strict=True):
            self._copy_back(bucket, handle.wait())

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

    def wanted(self) -> dict[str, tuple[Tensor, TensorLayout]]:
        """Every slice this rank holds, to be overwritten when state is loaded, by a unique key.

        After writing, call ``publish``. Optimizer state exists only after ``prepare``.
        """
        return {
            f"{kind}.{name}.{rank}": (tensor, self._layout(kind, name, rank))
            for kind, (name, rank), tensor in self._tensors()
        }

    def reload(self) -> None:
        """Take the parameters' values as masters (after loading parameters alone)."""
        for _, span in self._accumulator.spans():
            for rank in range(self._data.size):
                if (span.name, rank) in self.masters:
                    self.masters[span.name, rank].data.copy_(self._slice(span, rank).detach())

    def prepare(self) -> None:
        """Create the inner optimizer's state, which torch does in its first update, all zero.

        That update is taken back. Write loaded values into ``wanted()`` and ``steps`` afterwards.
        """
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
        if self._inner is not None:
            for group in self._inner.param_groups:
                group["lr"] = lr
            self._inner.step()

    def _state(self, master: Tensor) -> dict[str, Any]:
        return {} if self._inner is None else self._inner.state.get(master, {})

    def _tensors(self) -> Iterable[tuple[str, Piece, Tensor]]:
        for piece, master in self.masters.items():
            yield "master", piece, master.detach()
            for key, entry in self._state(master).items():
                if isinstance(entry, Tensor) and entry.shape == master.shape and key != "step":
                    yield key, piece, entry

    def _layout(self, kind: str, name: str, rank: int) -> TensorLayout:
        return self._accumulator.owned_layout(name, rank).renamed(f"optimizer.{kind}.{name}")

    def _slice(self, span: Span, rank: int) -> Tensor:
        start, stop = span.owned(rank)
        flat = self._parameter(span.name).detach().reshape(-1)
        return flat[start:stop].float().clone().requires_grad_()

    def _gather_gradients(self, slices: Slices) -> dict[Piece, Tensor]:
        """Every data rank's slices."""
        found: dict[Piece, Tensor] = {}
        for bucket in self._accumulator.buckets:
            row = torch.zeros(1, bucket.width, device=self._accumulator.mesh.device)
            for span in bucket.spans:
                slice_ = slices[span.name]
                row[0, span.offset : span.offset + slice_.numel()] = slice_
            rows = all_gather(row, self._data)
            for span in bucket.spans:
                for rank in range(self._data.size):
                    start, stop = span.owned(rank)
                    found[span.name, rank] = rows[rank, span.offset : span.offset + stop - start]
        return found

    def _copy_masters(self) -> None:
        """All masters are here: copy each into its range of its parameter."""
        for _, span in self._accumulator.spans():
            flat = self._parameter(span.name).data.view(-1)
            for rank in range(self._data.size):
                master = self.masters.get((span.name, rank))
                if master is not None:
                    start, stop = span.owned(rank)
                    flat[start:stop].copy_(master)

    def _filled(self, bucket: Bucket) -> Tensor:
        """This rank's row (1, width) of a bucket: its masters in the parameters' dtype."""
        row = torch.zeros(1, bucket.width, dtype=bucket.dtype, device=self._accumulator.mesh.device)
        for span in bucket.spans:
            master = self.masters.get((span.name, self._data.rank))
            if master is not None:
                row[0, span.offset : span.offset + master.numel()] = master
        return row

    def _copy_back(self, bucket: Bucket, rows: Tensor) -> None:
        """Masters (d, width) into the parameters; tied ones share storage and change together."""
        for span in bucket.spans:
            read(rows, span, self._parameter(span.name).data)

    def _parameter(self, name: str) -> Tensor:
        return self._accumulator.parameters[self._accumulator.logical[name]]


def _options(
    groups: Sequence[ParameterGroup], masters: Mapping[Piece, Tensor]
) -> list[dict[str, Any]]:
    """torch parameter groups over the masters, each piece in the group of its name."""
    pieces: dict[str, list[Tensor]] = {}
    for (name, _), master in masters.items():
        pieces.setdefault(name, []).append(master)
    options = []
    for group in groups:
        own = [master for name in group.names for master in pieces.pop(name, [])]
        if own:
            options.append({"params": own, "weight_decay": group.weight_decay})
    if pieces:
        raise ValueError(f"parameters {sorted(pieces)} are in no group: every one needs options")
    return options
