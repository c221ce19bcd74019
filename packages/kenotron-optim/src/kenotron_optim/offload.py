"""Place of masters and optimizer state between updates: on the device, or in host memory.

Offload keeps 12 bytes a parameter on the host (ZeRO-Offload, Ren et al., arXiv 2101.06840). Unlike
there the update stays on the device, and has the bits of one without offload: what belongs to one
bucket is copied to the device, updated by the same kernels, and copied back. Between updates these
tensors have an empty storage on the device, so torch's optimizers see the same tensors always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kenotron_optim.accumulate import GradAccumulator
from kenotron_optim.host_tensors import host_tensors
from kenotron_optim.masters import make_masters, pieces_of
from kenotron_optim.torch_groups import Piece, state_of
from kenotron_optim.zero_stage import ZeroStage

Step = Callable[[torch.optim.Optimizer], None]
"""Updates the masters of an optimizer's groups."""


class DeviceState:
    """Masters and state on the device, where updates need them: nothing is ever copied."""

    values: Mapping[Piece, Tensor]
    """Values that parameters are gathered from, on the device: the masters, or their values in the
    dtype of the parameters."""

    def make_masters(self, accumulator: GradAccumulator, stage: ZeroStage) -> dict[Piece, Tensor]:
        """Return the flat masters of a rank; see ``kenotron_optim.masters``."""
        self.values = masters = make_masters(accumulator, stage)
        return masters

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take the optimizers over the masters, which hold the state."""

    def held(self, masters: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Let flat masters and their state have memory on the device within the context."""
        return nullcontext()

    def advance(self, optimizer: torch.optim.Optimizer, step: Step) -> None:
        """Call ``step`` for all groups of the optimizer."""
        step(optimizer)

    def kept(self, tensor: Tensor, *, writes: bool = True) -> Tensor:
        """Return what holds a master, or a tensor of the state, between updates: live, no copy.

        It is of any shape. ``writes``: whether the caller may change it.
        """
        return tensor.detach()

    def read_values(self) -> None:
        """Take ``values`` as masters."""

    def write_values(self) -> None:
        """Write the masters into ``values``, if what ``kept`` returned may have changed."""


class HostState(DeviceState):
    """Masters and state in host memory, those of one bucket at a time on the device.

    Args:
        device: of the parameters; for all but a CPU the host memory is page-locked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pins = device, device.type != "cpu"
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._hosts: dict[Tensor, Tensor] = {}
        """By master, and by tensor of the state."""
        self._values_of: dict[Tensor, Tensor] = {}
        self._bucket_of: dict[Tensor, int] = {}
        self._there: set[Tensor] = set()
        """Masters that have memory on the device."""
        self._copied: torch.Event | None = None
        self._may_differ = False

    @torch.no_grad()
    def make_masters(self, accumulator: GradAccumulator, stage: ZeroStage) -> dict[Piece, Tensor]:
        """Return flat masters that have no memory on the device any more.

        Up to stage 2 ``values`` are the parameters' own memory.
        """
        masters, values = dict[Piece, Tensor](), dict[Piece, Tensor]()
        for number, pieces in groupby(pieces_of(accumulator, stage), lambda each: each[0]):
            made = []
            for _, piece, span in pieces:
                own = accumulator.range_of(span, piece[1])
                values[piece] = own.clone() if stage.cuts_parameters else own
                masters[piece] = master = own.to(torch.float32, copy=True).requires_grad_()
                self._values_of[master], self._bucket_of[master] = values[piece], number
                made.append(master)
            self._keep(made)
        self.values = values
        return masters

    def attach(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take the optimizers; state that they have made is moved to the host."""
        self._optimizers = optimizers
        self._keep([x for master in self._values_of for x in self._state(master)])

    @contextmanager
    def held(self, masters: Iterable[Tensor]) -> Iterator[None]:
        """Copy flat masters and their state to the device; at the end back, and into ``values``.

        All copies are queued on the current stream, and this process waits for none. Masters that
        have memory already are passed over.
        """
        own = [master for master in masters if master not in self._there]
        self._there.update(own)
        self._fetch(own)
        yield
        with torch.no_grad():
            if own:
                torch._foreach_copy_([self._values_of[master] for master in own], own)
        self._keep([x for master in own for x in (master, *self._state(master))])
        self._there.difference_update(own)

    def advance(self, optimizer: torch.optim.Optimizer, step: Step) -> None:
        """Call ``step`` for the masters of one bucket after the other."""
        groups = optimizer.param_groups
        buckets: dict[int, dict[int, dict[str, Any]]] = {}
        for i, group in enumerate(groups):
            for master in group["params"]:
                own = buckets.setdefault(self._bucket_of[master], {})
                own.setdefault(i, {**group, "params": []})["params"].append(master)
        try:
            for _, own in sorted(buckets.items()):
                optimizer.param_groups = list(own.values())
                with self.held([x for group in own.values() for x in group["params"]]):
                    step(optimizer)
        finally:
            optimizer.param_groups = groups

    def kept(self, tensor: Tensor, *, writes: bool = True) -> Tensor:
        """See ``DeviceState``: the host's values, once there; others as they are."""
        self._wait()
        self._may_differ |= writes
        return self._hosts.get(tensor, tensor).detach()

    @torch.no_grad()
    def read_values(self) -> None:
        """Take ``values`` as masters. This process waits for them."""
        self._wait()
        for master, values in self._values_of.items():
            self._hosts[master].copy_(values)

    @torch.no_grad()
    def write_values(self) -> None:
        """Cast the masters into ``values``, unless the last update did and they are the same."""
        if self._may_differ:
            self._wait()
            for master, values in self._values_of.items():
                values.copy_(self._hosts[master])
        self._may_differ = False

    @torch.no_grad()
    def _fetch(self, masters: Sequence[Tensor]) -> None:
        """Give memory to what the host has, and fill it."""
        tensors = [x for master in masters for x in (master, *self._state(master))]
        kept = [x for x in tensors if x in self._hosts]
        for tensor in kept:
            tensor.untyped_storage().resize_(tensor.nbytes)
        if kept:
            torch._foreach_copy_(kept, [self._hosts[x] for x in kept], non_blocking=True)

    @torch.no_grad()
    def _keep(self, tensors: list[Tensor]) -> None:
        """Copy tensors to the host and take their memory; it is used again behind the copies."""
        if not tensors:
            return
        fresh = [x for x in tensors if x not in self._hosts]
        self._hosts.update(zip(fresh, host_tensors(fresh, pin=self._pins), strict=True))
        torch._foreach_copy_([self._hosts[x] for x in tensors], tensors, non_blocking=True)
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)
        if self._pins:
            self._copied = torch.accelerator.current_stream(self._device).record_event()

    def _state(self, master: Tensor) -> list[Tensor]:
        """State with the shape of its master; a count of steps stays where it is."""
        return [entry for _, entry in state_of(self._optimizers, master)]

    def _wait(self) -> None:
        """Wait until all copies to the host are complete."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
