"""An optimizer over slices: fp32 masters and state for what a rank owns (ZeRO, arXiv 1910.02054).

Stage 0 keeps every data rank's slices on every rank, the others only their own. All take the same
reduction and update slices of the same length, so they agree bit for bit. Stage 0 gathers
gradients, stage 1 updated parameters. Stage 2 is stage 1 with an accumulator that keeps slices of
gradients (``reduce="micro_batch"``); stage 3 gathers parameters where they are used. Up to stage 2
the master of an fp32 parameter is the parameter's own memory; others have a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import TensorLayout
from kenotron_dist.gradients import scale_by
from kenotron_optim.accumulate import GradAccumulator, Slices
from kenotron_optim.compact_state import compact_state
from kenotron_optim.fused import deciding, is_fused
from kenotron_optim.gradient_gather import gather_gradients
from kenotron_optim.groups import ParameterGroup
from kenotron_optim.parameter_gather import ParameterGathers
from kenotron_optim.parameter_shards import ParameterShards, Regather, check_whole
from kenotron_optim.partition import Span
from kenotron_optim.state_creation import create_state
from kenotron_optim.torch_groups import Piece, check_elementwise, check_names, options_of

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
        stage: 0 to 3 (see above).
        state_dtype: float32, or bfloat16: see ``compact_state``.
        regather: with stage 3, when parameters are freed; see ``ParameterShards``.

    Raises ValueError for another stage or dtype, stage 0 without whole gradients, a parameter of
    this stage that is in no group or in two, and a name that the model has not.
    """

    def __init__(
        self,
        accumulator: GradAccumulator,
        make_optimizer: MakeOptimizer,
        groups: Sequence[ParameterGroup],
        stage: int = 1,
        state_dtype: torch.dtype = torch.float32,
        regather: Regather = "layer",
    ) -> None:
        if stage not in range(4):
            raise ValueError(f"ZeRO stage {stage} is not available: choose 0, 1, 2 or 3")
        if stage == 0 and accumulator.slice_sums:
            raise ValueError(
                "ZeRO stage 0 gathers gradients, of which the accumulator keeps slices alone: make "
                "it with reduce='step', or choose another stage"
            )
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
        made = make_optimizer(options) if options else []  # a rank may own nothing
        self._inner = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
        check_elementwise(self._inner)
        self._gathers = (
            ParameterShards(accumulator, regather, self.masters)
            if stage == 3
            else ParameterGathers(accumulator, gathers=stage > 0)
        )
        self._loaded: dict[str, Tensor] = {}  # by ``parameter_slices``
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
        waits for nothing; otherwise it reads ``blocked``. After ``overlap_forward`` parameters may
        be in flight when it returns. Collective over the data axes.

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
        self._gathers.settle()  # a master may be a part of what is gathered
        gathers = self.stage == 0 and any(axis.size > 1 for axis in self._axes.values())
        gradients = gather_gradients(self._accumulator, slices) if gathers else None
        for (name, rank), master in self.masters.items():
            gradient = slices[name] if gradients is None else gradients[name, rank]
            master.grad = gradient if master.ndim == 1 else gradient.view_as(master)
        self._update(lr, coefficient, blocked)
        self._steps += 1
        for master in self.masters.values():
            master.grad = None
        self.publish()

    def publish(self) -> None:
        """Write the masters into the parameters, cast to their dtype. Collective from stage 1 on.

        While one group's slices travel, the next one's are cast. After ``overlap_forward``
        parameters may be in flight when it returns; with stage 3 they are freed until their use.
        """
        self._loaded = {}
        self._gathers.publish(self.masters)

    def overlap_forward(self, modules: Iterable[nn.Module]) -> None:
        """Let updated parameters travel behind the next forward of ``modules``.

        From now on ``step`` and ``publish`` return before all-gathers have ended. A pre-hook on
        each module waits for what that module reads; one that reads parameters of another must be
        called after it. Call ``wait_for_parameters`` before anything else reads parameters.
        ``state``, ``wanted``, ``reload`` and ``prepare`` do, and up to stage 2 deep copies.

        With stage 3 each module is a unit: its parameters have memory from the begin of its forward
        to its end, and from the begin of its backward until they have their gradients.

        Args:
            modules: all that have parameters, in the order of the forward, the same on all data
                ranks, such as the layers. Collective over the data axes.

        Raises:
            ValueError: a parameter belongs to none of the modules, or data ranks differ; with
                stage 3 also a module that is compiled itself, and a parameter that is a part of a
                larger memory.
        """
        self._gathers.overlap_forward(modules)

    def wait_for_parameters(self) -> None:
        """Wait until all parameters are complete: on NCCL the current stream does, not the host.

        May be called at any time; no-op where nothing is in flight. With stage 3 it is collective
        over the data axes, and all parameters have memory until they are used or updated next.
        """
        self._gathers.wait()

    def state(self) -> dict[str, tuple[Tensor, TensorLayout]]:
        """This rank's own slices as logical tensors, by name, and their layouts.

        ``optimizer.master.<parameter>``, fp32, and ``optimizer.<state>.<parameter>``, of the dtype
        in which state is kept: the same records for stages 0 and 1. The tensors are the live ones,
        not copies.
        """
        self._gathers.settle()
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
        self._gathers.settle()
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

    def parameter_slices(self) -> dict[str, tuple[Tensor, TensorLayout]]:
        """With stage 3: this rank's slices of the parameters, by logical name, in their dtype.

        What is written into them counts if ``reload`` is called before the next update.
        """
        self._loaded = {
            name: master.detach().view(-1).to(self._parameter(name).dtype)
            for (name, _), master in self.masters.items()
        }
        layout = self._accumulator.owned_layout
        return {name: (values, layout(name)) for name, values in self._loaded.items()}

    def reload(self) -> None:
        """Take the parameters' values as masters (after loading parameters alone).

        With stage 3 those of ``parameter_slices``, or after ``wait_for_parameters`` the parameters.
        Raises RuntimeError where there are neither.
        """
        self._gathers.settle()
        check_whole(self._gathers.whole or bool(self._loaded))
        spans = {span.name: span for _, span in self._accumulator.spans()}
        for (name, rank), master in self.masters.items():
            loaded = self._loaded.get(name)
            values = self._slice(spans[name], rank).detach() if loaded is None else loaded
            master.data.copy_(values.view(master.shape))
        if self.stage == 3:
            self.publish()

    def prepare(self) -> None:
        """Create the state of the inner optimizers, which torch does in the first update, all zero.

        Write loaded values into ``wanted()`` and ``steps`` afterwards. It takes less memory than an
        update: a run that fits in memory while it trains also fits when it is resumed.
        """
        self._gathers.settle()
        self._prepared = True
        create_state(self._inner, list(self.masters.values()), self._advance)

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
        # With stage 3 the parameter's memory goes, and the master stays.
        return parameter.to(torch.float32, copy=self.stage == 3).requires_grad_()

    def _parameter(self, name: str) -> Tensor:
        return self._accumulator.parameters[self._accumulator.logical[name]]
