"""The executor: runs one stage's actions, sending and receiving activations.

Micro-batches enter as tensors on every stage (the loader gives all stages the same rows): the
first stage computes with them, the others read only their shape and their context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Axis, Handle, broadcast
from kenotron_pp.p2p import Channel
from kenotron_pp.schedule import Schedule, one_f_one_b

LossFn = Callable[[Tensor, int], Tensor]
"""(output of the last layer, micro-batch number) -> scalar; runs on the last stage."""


class Pipeline:
    """This rank's layers as one stage of a pipeline.

    Arguments:
        layers: this stage's layers in order. Each is called with the activation, or with the
            activation and the micro-batch's context when contexts are given.
        axis: the pp axis; size 1 runs everything here.
        schedule: order of forwards and backwards.
        device: where activations live.
        upstream: an axis over the same ranks for the gradients (``mesh.twin("pp")``). NCCL runs
            all transfers between two ranks in one order, so that activations and gradients over
            one group deadlock; gloo needs only one. Default: ``axis``.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        axis: Axis,
        schedule: Schedule = one_f_one_b,
        device: torch.device | str = "cpu",
        upstream: Axis | None = None,
    ) -> None:
        self.layers = list(layers)
        self._upstream = upstream or axis
        self.axis, self.schedule = axis, schedule
        self.device = torch.device(device)
        self.is_first = axis.rank == 0
        self.is_last = axis.rank == axis.size - 1
        self._down_in = self._channel(-1, upstream=False)
        self._down_out = self._channel(+1, upstream=False)
        self._up_in = self._channel(+1, upstream=True)
        self._up_out = self._channel(-1, upstream=True)

    def run(
        self, inputs: Sequence[Tensor], loss_fn: LossFn, contexts: Sequence[Any] | None = None
    ) -> Tensor:
        """Forward and backward of all micro-batches; gradients land on the parameters.

        Arguments: what enters the first layer, per micro-batch; the loss of each, already scaled
        so that their sum is the loss of the batch; what the layers may read beside it. Returns the
        sum of the losses, the same detached scalar on every stage. Raises ValueError when the
        numbers of inputs and contexts differ.
        """
        _check(inputs, contexts)
        step = _Step(self, inputs, loss_fn, contexts)
        for action in self.schedule(self.axis.rank, self.axis.size, len(inputs)):
            if action.kind == "F":
                step.forward(action.microbatch)
            else:
                step.backward(action.microbatch)
        step.drain()
        return self._share(step.loss)

    @torch.no_grad()
    def forward(
        self, inputs: Sequence[Tensor], contexts: Sequence[Any] | None = None
    ) -> list[Tensor]:
        """Outputs of the last layer for every micro-batch, without gradients; [] elsewhere."""
        _check(inputs, contexts)
        outputs, handles = [], []
        for m, x in enumerate(inputs):
            if self._down_in is not None:
                x = self._down_in.receive(m, _key(inputs[m])).wait()
            y = self.compute(x, m, contexts)
            if self._down_out is not None:
                handles += self._down_out.send(y, m, _key(inputs[m]))
            else:
                outputs.append(y)
        for handle in handles:
            handle.wait()
        return outputs

    def evaluate(
        self, inputs: Sequence[Tensor], loss_fn: LossFn, contexts: Sequence[Any] | None = None
    ) -> Tensor:
        """Sum of the losses without gradients, the same scalar on every stage."""
        losses = [loss_fn(y, m) for m, y in enumerate(self.forward(inputs, contexts))]
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total = total + loss.detach()
        return self._share(total)

    def compute(self, x: Tensor, microbatch: int, contexts: Sequence[Any] | None) -> Tensor:
        """This stage's layers on one activation."""
        for layer in self.layers:
            x = layer(x) if contexts is None else layer(x, contexts[microbatch])
        return x

    def _share(self, loss: Tensor) -> Tensor:
        return broadcast(loss.float(), self.axis, source=self.axis.size - 1)

    def _channel(self, step: int, *, upstream: bool) -> Channel | None:
        peer = self.axis.rank + step
        if not 0 <= peer < self.axis.size:
            return None
        axis = self._upstream if upstream else self.axis
        return Channel(axis, peer, upstream=upstream, device=self.device)


class _Step:
    """The micro-batches alive during one ``run``."""

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: Sequence[Tensor],
        loss_fn: LossFn,
        contexts: Sequence[Any] | None,
    ) -> None:
        self.pipeline, self.inputs = pipeline, inputs
        self.loss_fn, self.contexts = loss_fn, contexts
        self.loss = torch.zeros((), device=pipeline.device)
        self._live: dict[int, tuple[Tensor, Tensor]] = {}
        self._sent: dict[int, list[Handle]] = {}
        self._returned: list[Handle] = []

    def forward(self, m: int) -> None:
        """Receive (or take) the input of micro-batch ``m``, compute, send (or add the loss)."""
        pipeline, x = self.pipeline, self.inputs[m]
        if pipeline._down_in is not None:
            x = pipeline._down_in.receive(m, _key(x)).wait().requires_grad_()
        y = pipeline.compute(x, m, self.contexts)
        if pipeline._down_out is not None:
            self._sent[m] = pipeline._down_out.send(y.detach(), m, _key(self.inputs[m]))
        else:
            y = self.loss_fn(y, m)
            self.loss += y.detach()
        self._live[m] = (x, y)

    def backward(self, m: int) -> None:
        """Receive the output's gradient, run backward, send the input's; free both."""
        pipeline, (x, y) = self.pipeline, self._live.pop(m)
        if pipeline._up_in is None:
            y.backward()
        else:
            y.backward(pipeline._up_in.receive(m, _key(self.inputs[m])).wait())
            for handle in self._sent.pop(m):  # its gradient is here: the activation has arrived
                handle.wait()
        if pipeline._up_out is not None:
            assert x.grad is not None  # it required one
            self._returned += pipeline._up_out.send(x.grad, m, _key(self.inputs[m]))

    def drain(self) -> None:
        """Wait until the last gradients have left."""
        for handle in self._returned:
            handle.wait()


def _key(tokens: Tensor) -> tuple[int, ...]:
    return tuple(tokens.shape)


def _check(inputs: Sequence[Tensor], contexts: Sequence[Any] | None) -> None:
    if contexts is not None and len(contexts) != len(inputs):
        raise ValueError(f"{len(inputs)} micro-batches were given {len(contexts)} contexts")
