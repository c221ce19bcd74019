"""An optimizer over slices: fp32 masters and state for what a rank owns (ZeRO-1, arXiv 1910.02054).

Stage 0 keeps every data rank's slices on every rank, stage 1 only its own. Both take the same
reduction and update slices of the same length, so they agree bit for bit; stage 0 gathers
gradients, stage 1 gathers updated parameters. The master of an fp32 parameter is the parameter's
own memory; others have a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import TensorLayout, gather_rows
from kenotron_dist.gradients import scale_by
from kenotron_optim.accumulate import GradAccumulator, Slices
from kenotron_optim.compact_state import compact_state
from kenotron_optim.fused import deciding, is_fused
from kenotron_optim.groups import ParameterGroup
from kenotron_optim.parameter_gather import ParameterGathers
from kenotron_optim.partition import Span
from kenotron_optim.torch_groups import Piece, batches, check_elementwise, check_names, options_of

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizers]
"""Parameter groups -> ``torch.optim`` optimizers that share them out: elementwise ones for slices,
any for groups that are marked ``whole``, whose tensors have the parameters' own shapes."""


class SlicedOptimizer:
    """Steps ``make_optimizer``'s optimizer on fp32 masters of parameter slices.

    Arguments:
        accumulator: has the parameters, their layouts and buckets.
        make_optimizer: builds the update rule; its state must have the shape of what it updates.
        groups: options by logical name; names of other stages are passed over.
        stage: 0 or 1 (see above).
        state_dtype: float32, or bfloat16: see ``compact_state``.

    Raises ValueError for another stage or dtype, a parameter of this stage that is in no group or
    in two, and a name that the model has not.
    """

    def __init__(
        self,
        accumulator: GradAccumulator,
        make_optimizer: MakeOptimizer,
        groups: Sequence[ParameterGroup],
        stage: int = 1,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        if stage not in (0, 1):
            raise ValueError(f"ZeRO stage {stage} is not available: choose 0 or 1")
        self._accumulator, self.stage = accumulator, stage
        self._axes = {span.name: accumulator.axis_of(span.name) for _, span in accumulator.spans()}
        self.masters: dict[Piece, Tensor] = {
            (span.name, rank): self._slice(span, rank)
            for _, span in accumulator.spans()
            for axis in [self._axes[span.name]]
            for rank in ([axis.rank] if stage else range(axis.size))
            if span.owned(rank)[0] < span.owned(rank)[1]
        }
        whole = {span.name for _, span in accumulator.spans() if span.owner is not None}
        check_names(groups, accumulator.names)
        options = options_of(groups, self.masters, whole)
        # A rank may own nothing: few small parameters on many data ranks.
        made = make_optimizer(options) if options else []
        self._inner = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        check_elementwise(self._inner)
        self._gathers = ParameterGathers(accumulator, gathers=stage == 1)
        self._steps, self._prepared = 0, False
        self._compact = compact_state(state_dtype, self.masters, accumulator.spans())

    def step(
        self,
        slices: Slices,
        lr: float,
        *,
        coefficient: Tensor | None = None,
        blocked: Tensor | None = None,
    ) -> None:
        """Update masters with gradient ``slices`` and parameters with masters.

        Where every inner optimizer is fused, both tensors are read on their device and this process
        waits for nothing. Otherwise it reads ``blocked``. After ``overlap_forward`` parameters may
        still be in flight when it returns. Collective over the data axes.

        Args:
            slices: this rank's part of the gradient.
            lr: learning rate, multiplied by each group's factor.
            coefficient: scalar by which gradients are multiplied before (``clip_coefficient``).
            blocked: bool scalar, the same on all ranks; true: nothing changes. Once that is known
                on the host, call ``left_out``.

        Raises:
            ValueError: the rate is negative or not finite.
        """
        if not 0 <= lr < float("inf"):
            raise ValueError(f"lr {lr} must be finite and not negative")
        self.wait_for_parameters()  # a master may be a part of what is gathered
        gathers = self.stage == 0 and any(axis.size > 1 for axis in self._axes.values())
        gradients = self._gather_gradients(slices) if gathers else None
        for (name, rank), master in self.masters.items():
            gradient = slices[name] if gradients is None else gradients[name, rank]
            master.grad = gradient if master.ndim == 1 else gradient.view_as(master)
        self._update(lr, coefficient, blocked)
        self._steps += 1
        for master in self.masters.values():
            master.grad = None
        self.publish()

    def publish(self) -> None:
        """Write the masters into the parameters, cast to their dtype. Collective under stage 1.

        While one group's slices travel, in place, the next one's are cast. After
        ``overlap_forward`` parameters may still be in flight when it returns.
        """
        self._gathers.publish(self.masters)

    def overlap_forward(self, modules: Iterable[nn.Module]) -> None:
        """Let updated parameters travel behind the next forward of ``modules``.

        From now on ``step`` and ``publish`` return before stage 1's all-gathers have ended. A
        pre-hook on each module waits for what that module reads; one that reads parameters of
        another must be called after it. Call ``wait_for_parameters`` before anything else reads
        parameters. ``state``, ``wanted``, ``reload``, ``prepare`` and deep copies of modules do.

        Args:
            modules: all that have parameters, in the order of the forward, the same on all data
                ranks, such as the layers. Collective over the data axes.

        Raises:
            ValueError: a parameter belongs to none of the modules, or data ranks differ.
        """
        self._gathers.overlap_forward(modules)

    def wait_for_parameters(self) -> None:
        """Wait until all parameters are complete: on NCCL the current stream does, not the host.

        May be called at any time; no-op where nothing is in flight.
        """
        self._gathers.wait()

    def state(self) -> dict[str, tuple[Tensor, TensorLayout]]:
        """This rank's own slices as logical tensors, by name, and their layouts.

        ``optimizer.master.<parameter>``, fp32, and ``optimizer.<state>.<parameter>``, of the dtype
        in which state is kept: the same records for stages 0 and 1. The tensors are the live ones,
        not copies.
        """
        self.wait_for_parameters()
        found = {}
        for kind, (name, rank), tensor in self._tensors():
            if rank == self._axes[name].rank:
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
        self.wait_for_parameters()
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
        self.wait_for_parameters()
        spans = {span.name: span for _, span in self._accumulator.spans()}
        for (name, rank), master in self.masters.items():
            master.data.copy_(self._slice(spans[name], rank).detach())

    def prepare(self) -> None:
        """Create the state of the inner optimizers, which torch does in the first update, all zero.

        Write loaded values into ``wanted()`` and ``steps`` afterwards. Next to the state it takes
        memory for twice the largest master, less than an update does: a run that fits in memory
        while it trains also fits when it is resumed.
        """
        self.wait_for_parameters()
        self._prepared = True
        limit = max((master.nbytes for master in self.masters.values()), default=0)
        for optimizer in self._inner:
            groups = optimizer.param_groups
            try:
                for group in groups:
                    for batch in batches(group["params"], limit):
                        optimizer.param_groups = [{**group, "params": batch, "lr": 0.0}]
                        self._create_state(optimizer, batch)
            finally:
                optimizer.param_groups = groups

    def _create_state(self, optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]) -> None:
        """Let torch create the state of some masters by an update, and undo that update."""
        before = [master.detach().clone() for master in masters]
        for master in masters:
            master.grad = torch.zeros_like(master)
        self._advance(optimizer)
        for master, value in zip(masters, before, strict=True):
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

    def left_out(self) -> None:
        """Do not count the last step: it was blocked."""
        self._steps -= 1

    def _update(self, lr: float, coefficient: Tensor | None, blocked: Tensor | None) -> None:
        for optimizer in self._inner:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_multiplier"]
        if all(map(is_fused, self._inner)):
            for optimizer in self._inner:
                with deciding(optimizer, coefficient, blocked):
                    self._advance(optimizer)
        elif blocked is None or not blocked.item():
            if coefficient is not None:
                scale_by([m.grad for m in self.masters.values() if m.grad is not None], coefficient)
            for optimizer in self._inner:
                self._advance(optimizer)

    def _advance(self, optimizer: torch.optim.Optimizer) -> None:
        if self._compact is not None:
            return self._compact.step(optimizer, self._steps + 1)
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

    def _gather_gradients(self, slices: Slices) -> dict[Piece, Tensor]:
        """Every data rank's slices, gathered where they were added up."""
        found: dict[Piece, Tensor] = {}
        handles = []
        for bucket, rows in zip(self._accumulator.buckets, self._accumulator.buffers, strict=True):
            axis = self._accumulator.mesh[bucket.axes]
            if rows.dtype != torch.float32:
                rows = bucket.buffer(torch.float32, rows.device)
            for span in bucket.spans:
                slice_ = slices[span.name]
                place = rows[axis.rank, span.offset : span.offset + slice_.numel()]
                if place.data_ptr() != slice_.data_ptr():
                    place.copy_(slice_)
                for rank in range(axis.size):
                    start, stop = span.owned(rank)
                    found[span.name, rank] = rows[rank, span.offset : span.offset + stop - start]
            handles.append(gather_rows(rows, axis))
        for handle in handles:
            handle.wait()
        return found

    def _parameter(self, name: str) -> Tensor:
        return self._accumulator.parameters[self._accumulator.logical[name]]
