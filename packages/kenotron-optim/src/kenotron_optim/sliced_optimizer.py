"""An optimizer over slices: fp32 masters and state for what a rank owns (ZeRO, arXiv 1910.02054).

Stage 0 keeps every data rank's slices on every rank, the others only their own. All take the same
reduction and update slices of the same length, so they agree bit for bit. Stage 0 gathers
gradients, stage 1 updated parameters. Stage 2 is stage 1 with an accumulator that keeps slices of
gradients (``reduce="micro_batch"``); stage 3 gathers parameters where they are used. Up to stage 2
the master of an fp32 parameter is the parameter's own memory; others have a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kenotron_dist.gradients import scale_by
from kenotron_dist.placement import TensorLayout
from kenotron_optim import torch_groups
from kenotron_optim.accumulate import GradAccumulator, Slices
from kenotron_optim.compact_state import compact_state
from kenotron_optim.config import Regather
from kenotron_optim.fused import deciding, is_fused
from kenotron_optim.gradient_gather import gather_gradients
from kenotron_optim.groups import ParameterGroup
from kenotron_optim.offload import DeviceState, HostState
from kenotron_optim.parameter_gather import ParameterGathers, check_whole, listed
from kenotron_optim.parameter_shards import ParameterShards
from kenotron_optim.state_creation import create_state
from kenotron_optim.torch_groups import MakeOptimizer, Piece, check_names, options_of, state_of
from kenotron_optim.update_rule import exchange_of
from kenotron_optim.zero_stage import ZeroStage


class SlicedOptimizer:
    """Steps ``make_optimizer``'s optimizer on fp32 masters of parameter slices.

    Args:
        accumulator: has the parameters, their layouts and buckets.
        make_optimizer: ``update_rule``, or any rule whose state has the shape of what it updates.
        groups: options by logical name; names of other stages are passed over.
        stage: 0 to 3 (see above).
        state_dtype: float32, or bfloat16: see ``compact_state``.
        regather: with stage 3, when parameters are freed; see ``ParameterShards``.
        offload: whether masters and state are in host memory between updates; see ``HostState``.

    Raises:
        ValueError: another stage or dtype, stage 0 without whole gradients, a parameter of this
            stage that is in no group or in two, or a name that the model has not.
    """

    def __init__(
        self,
        accumulator: GradAccumulator,
        make_optimizer: MakeOptimizer,
        groups: Sequence[ParameterGroup],
        stage: int = 1,
        state_dtype: torch.dtype = torch.float32,
        regather: Regather = "layer",
        *,
        offload: bool = False,
    ) -> None:
        self._accumulator, self.stage = accumulator, ZeroStage(stage)
        self._axes = {span.name: accumulator.axis_of(span.name) for _, span in accumulator.spans()}
        self._memory = HostState(accumulator.mesh.device) if offload else DeviceState()
        self.masters = self._memory.make_masters(accumulator, self.stage)
        check_names(groups, accumulator.names)
        self._exchange = exchange_of(make_optimizer, accumulator, whole=not self.stage.cuts_states)
        options = options_of(groups, self.masters, self._exchange)
        self._inner = torch_groups.made_of(make_optimizer, options)
        self._memory.attach(self._inner)
        self._gathers = (
            ParameterShards(accumulator, regather, self._memory.values)
            if self.stage.cuts_parameters
            else ParameterGathers(accumulator, gathers=self.stage.cuts_states)
        )
        self._loaded: dict[str, Tensor] | None = None  # by ``parameter_slices``
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

        Raises ValueError for a rate that is negative or not finite.
        """
        if not 0 <= lr < float("inf"):
            raise ValueError(f"lr {lr} must be finite and not negative")
        self._gathers.settle()  # a master may be a part of what is gathered
        replicated = any(axis.size > 1 for axis in self._axes.values())
        gathers = replicated and not self.stage.cuts_states
        gradients = gather_gradients(self._accumulator, slices) if gathers else None
        for (name, rank), master in self.masters.items():
            gradient = slices[name] if gradients is None else gradients[name, rank]
            master.grad = gradient
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
        self._loaded = None
        self._memory.write_values()
        self._gathers.publish(self._memory.values)

    def overlap_forward(
        self, modules: Iterable[nn.Module], fill: Callable[[nn.Module], None] | None = None
    ) -> None:
        """Let updated parameters travel behind the next forward of ``modules``.

        From now on ``step`` and ``publish`` return before all-gathers have ended. A pre-hook on
        each module waits for what that module reads; one that reads parameters of another must be
        called after it. Call ``wait_for_parameters`` before anything else reads parameters.
        ``state``, ``wanted``, ``reload`` and ``prepare`` do, and up to stage 2 deep copies.

        With stage 3 each module is a unit: its parameters have memory from the begin of its forward
        to its end, and from the begin of its backward until they have their gradients; those that
        a later reader needs (``late_reads.is_read_later``) stay in between.

        Args:
            modules: all that have parameters, in the order of the forward, the same on all data
                ranks, such as the layers. Collective over the data axes.
            fill: with stage 3, gives a module its first values. It is called with one after the
                other, and no other has memory then: parameters may have had none so far
                (``kenotron_dist.placement.materialize``).

        Raises:
            ValueError: ``modules`` is no list of modules, a parameter belongs to none of them, or
                data ranks differ; ``fill`` with another stage than 3; with stage 3 a second call, a
                module that is compiled itself, and a parameter that is a part of a larger memory.
        """
        self._gathers.overlap_forward(listed(modules))
        if fill is not None:
            self._gathers.fill(fill)
            self._memory.read_values()

    def rewrite(self, write: Callable[[nn.Module], None]) -> None:
        """Let a function write into the modules of ``overlap_forward``, one after the other.

        Collective over the data axes. With stage 3 no other module has memory meanwhile.
        """
        self._gathers.rewrite(write)
        self._memory.read_values() if self.stage.cuts_parameters else self.reload()

    def wait_for_parameters(self) -> None:
        """Wait until all parameters are complete: on NCCL the current stream does, not the host.

        No-op where nothing is in flight. With stage 3 it is collective over the data axes, and all
        parameters have memory until they are used or updated next.
        """
        self._gathers.wait()

    def settle(self) -> None:
        """Wait for what is in flight. With stage 3 parameters without memory stay so."""
        self._gathers.settle()

    def state(self) -> dict[str, tuple[Tensor, TensorLayout]]:
        """This rank's own slices as logical tensors, by name, and their layouts.

        ``optimizer.master.<parameter>``, fp32, and ``optimizer.<state>.<parameter>``, of the dtype
        in which state is kept: the same records for all stages. The tensors are live, not copies.
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
        """With stage 3: this rank's slices of the parameters, frozen matrices too, by logical name,
        in their dtype; changes of them count if ``reload`` is called before the next update."""
        held, frozen = self._accumulator, self._accumulator.frozen.slices()
        self._loaded = {
            name: values.detach().view(-1).to(held.tensor(name).dtype)
            for (name, _), values in self._memory.values.items()
        }
        return frozen | {n: (part, held.owned_layout(n)) for n, part in self._loaded.items()}

    def reload(self) -> None:
        """Take the parameters' values as masters (after loading parameters alone).

        With stage 3 those of ``parameter_slices``, or after ``wait_for_parameters`` the parameters;
        raises RuntimeError where there are neither.
        """
        self._gathers.settle()
        check_whole(self._gathers.whole or self._loaded is not None)
        spans = {span.name: span for _, span in self._accumulator.spans()}
        self._accumulator.frozen.take_again() if self._loaded is None else None
        for (name, rank), master in self.masters.items():
            loaded = None if self._loaded is None else self._loaded.get(name)
            values = self._accumulator.range_of(spans[name], rank) if loaded is None else loaded
            self._memory.kept(master).copy_(values.view(master.shape))
        if self.stage.cuts_parameters:
            self.publish()

    def kept_masters(self, *, writes: bool = False) -> dict[Piece, Tensor]:
        """Masters, flat, where they are between updates; if ``writes``, ``publish`` afterwards."""
        return {p: self._memory.kept(m, writes=writes).view(-1) for p, m in self.masters.items()}

    def prepare(self) -> None:
        """Create the state of the inner optimizers, which torch does in the first update, all zero.

        Write loaded values into ``wanted()`` and ``steps`` afterwards. It takes less memory than an
        update: a run that fits in memory while it trains also fits when it is resumed.
        """
        self._gathers.settle()
        self._prepared = True
        create_state(self._inner, list(self.masters.values()), self._advance, self._memory.held)

    @property
    def steps(self) -> int:
        """Updates made so far, those before a resume included."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        for optimizer in self._inner:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(float(steps))

    def left_out(self) -> None:
        """Do not count the last step: it was blocked."""
        self._steps -= 1

    def _update(self, lr: float, coefficient: Tensor | None, blocked: Tensor | None) -> None:
        for optimizer in self._inner:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_multiplier"]
        if self._exchange is None and all(map(is_fused, self._inner)):
            for optimizer in self._inner:
                with deciding(optimizer, coefficient, blocked):
                    self._advance(optimizer)
        elif blocked is None or self._accumulator.mesh.is_fake or not blocked.item():
            if coefficient is not None:
                scale_by([m.grad for m in self.masters.values() if m.grad is not None], coefficient)
            for optimizer in self._inner:
                self._advance(optimizer)
            if self._exchange is not None:
                self._exchange.update(self.masters, self._inner, self._memory.held)

    def _advance(self, optimizer: torch.optim.Optimizer) -> None:
        if self._compact is None:
            return self._memory.advance(optimizer, lambda each: each.step())
        self._memory.advance(optimizer, partial(self._compact.step, number=self._steps + 1))

    def _tensors(self) -> Iterable[tuple[str, Piece, Tensor]]:
        for piece, master in self.masters.items():
            for kind, tensor in [("master", master), *state_of(self._inner, master)]:
                yield kind, piece, self._memory.kept(tensor).view(-1)

    def _layout(self, kind: str, name: str, rank: int) -> TensorLayout:
        return self._accumulator.owned_layout(name, rank).renamed(f"optimizer.{kind}.{name}")
