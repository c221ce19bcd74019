"""One run of a rank's actions: what is alive between them, and in which order it is freed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kenotron_pp.activation import Form, flatten, form_of, key_of, unflatten
from kenotron_pp.backward import SplitBackward, WeightPart, refuse_reentrant
from kenotron_pp.comm_plan import PlannedAction, RankPlan, Transfer
from kenotron_pp.engine import accumulate
from kenotron_pp.losses import AuxiliaryLosses, SharedLoss, check_scalar
from kenotron_pp.p2p import Links

LossFn = Callable[[Tensor, int], Tensor]
Entering = Callable[[int, Any, Any], Any]
"""(number of a stage, input and context of a micro-batch) -> what this stage passes on."""
"""(output of the last layer, micro-batch number) -> scalar; runs on the last stage."""
Over = Callable[[int], None]
"""Called with the number of a micro-batch when this rank has nothing more to do for it."""


@dataclass
class StagePart:
    """A rank's part of a pipeline: what all its runs have in common."""

    chunks: list[list[nn.Module]]
    n_stages: int
    """Of all ranks."""
    splits: bool
    """True where backwards come as I and W."""
    links: Links
    device: torch.device
    entering: Entering | None = None
    auxiliary: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)

    def __post_init__(self) -> None:
        self.splitters = [SplitBackward(chunk) for chunk in self.chunks]
        layers = [layer for chunk in self.chunks for layer in chunk]
        self.trainable = any(p.requires_grad for layer in layers for p in layer.parameters())
        self.unseen = [True] * len(self.chunks)
        """Chunks whose graph has not been looked at yet."""
        self.warm: set[bool] = set()
        """Modes (True: with backwards) of runs that have been made: all their kernels are
        loaded."""
        self._ones: dict[torch.dtype, Tensor] = {}

    def one(self, dtype: torch.dtype) -> Tensor:
        """The gradient of a loss, a scalar."""
        if dtype not in self._ones:
            self._ones[dtype] = torch.ones((), dtype=dtype, device=self.device)
        return self._ones[dtype]


class _Live:
    """Tensors that a forward keeps for its backward; not its outputs: their graph is enough."""

    __slots__ = ("inputs", "marks", "ones", "roots")

    def __init__(self, inputs: list[Tensor], marks: list[Tensor]) -> None:
        self.inputs = inputs
        """Those that want a gradient."""
        self.marks = marks
        """Those that only show where the graph begins."""
        self.roots: list[GradientEdge] = []
        """Outputs that need a gradient from the next stage, then scalars."""
        self.ones: list[Tensor] = []
        """Gradients of the scalars."""


class PipelineRun:
    """The micro-batches alive during one run; outputs are kept where there is no ``loss_fn``."""

    def __init__(
        self,
        part: StagePart,
        plan: RankPlan,
        inputs: Sequence[Any],
        contexts: Sequence[Any] | None,
        loss_fn: LossFn | None,
        shared: SharedLoss,
        over: Over | None,
        *,
        training: bool,
    ) -> None:
        self.part, self.plan, self.inputs = part, plan, inputs
        self.contexts, self.loss_fn, self.training = contexts, loss_fn, training
        self.over = over
        self.loss, self.shared = torch.zeros((), device=part.device), shared
        self.outputs: list[Any] = []
        """Of the last stage, when there is no loss function."""
        self.scalars: list[tuple[int, int, list[Tensor]]] = []
        """(micro-batch, stage, auxiliary losses)"""
        self._at: PlannedAction | str = "before its first action"
        self._live: dict[tuple[int, int], _Live] = {}
        self._weights: dict[tuple[int, int], WeightPart] = {}
        self._down: dict[tuple[int, int], tuple[Form, list[Tensor]]] = {}
        """Activations handed over on this rank, by the stage and micro-batch that takes them."""
        self._up: dict[tuple[int, int], list[Tensor]] = {}
        """Gradients likewise."""
        self._keys: list[Hashable] = [(self.training, key_of(x)) for x in inputs]

    @property
    def where(self) -> str:
        """Running action, in words."""
        at = self._at
        if isinstance(at, str):
            return at
        return f"stage {at.stage}, micro-batch {at.action.microbatch}, action {at.action}"

    def run(self) -> None:
        """All actions in order."""
        links = self.part.links
        form_of = None if self.part.entering is None else self._form_of
        links.begin(self.plan.queues, self._keys, form_of)
        if self.loss_fn is not None:
            self.shared.begin()
        last = {step.action.microbatch: step for step in self.plan.steps}
        for step in self.plan.steps:
            m = step.action.microbatch
            self._at = step
            if step.need is not None:
                links.post(step.need, ahead=False)
            for coming in self._ahead(step):
                links.post(coming, ahead=True)
            if step.release:
                links.release(step.release)
            if step.action.kind == "F":
                self._forward(step)
            elif step.action.kind == "W":
                self._weights.pop((step.stage, m)).run()
            else:
                self._backward(step)
            if self.over is not None and step is last[m]:
                self.over(m)
        self._at = "after its last action"
        links.finish()
        self.part.warm.add(self.training)

    def _form_of(self, transfer: Transfer) -> Form:
        """Return the form of an activation, from the layers before it."""
        m, entering = transfer.microbatch, self.part.entering
        assert entering is not None
        with torch.set_grad_enabled(self.training):
            x = entering(transfer.boundary, self.inputs[m], self.contexts and self.contexts[m])
        return form_of(*flatten(x))

    def _ahead(self, step: PlannedAction) -> Sequence[Transfer]:
        """Receives to post before an action computes.

        In a first run kernels are loaded, and that may wait for all queued work of the device: then
        only what has left its sender may be queued, which nothing on this rank keeps back.
        """
        if self.training not in self.part.warm:
            return step.underway
        return () if step.following is None else (step.following,)

    def _forward(self, step: PlannedAction) -> None:
        part, stage, m = self.part, step.stage, step.action.microbatch
        x, live = self._enter(step)
        if self.training:
            part.auxiliary.open()
        for layer in part.chunks[step.action.chunk]:
            x = layer(x) if self.contexts is None else layer(x, self.contexts[m])
        scalars = part.auxiliary.close()
        if stage == part.n_stages - 1:
            if self.loss_fn is None:
                self.outputs.append(x)
                return
            loss = self.loss_fn(x, m)
            check_scalar(loss)
            self.loss += loss.detach()
            if m == len(self.inputs) - 1:
                self.shared.leave(self.loss)
            if self.training and not loss.requires_grad and part.trainable:
                raise ValueError(
                    "the loss needs no gradient, although parameters do: was something detached?"
                )
            tops = [loss, *scalars]
        else:
            tops = scalars
            self._pass_on(step, x, live)
        if not self.training:
            return
        if scalars:
            self.scalars.append((m, stage, [scalar.detach() for scalar in scalars]))
        tops = [top for top in tops if top.requires_grad]
        live.roots += [get_gradient_edge(top) for top in tops]
        live.ones = [part.one(top.dtype) for top in tops]
        if not part.splits and part.unseen[step.action.chunk]:
            refuse_reentrant(live.roots)
            part.unseen[step.action.chunk] = False
        self._live[stage, m] = live

    def _enter(self, step: PlannedAction) -> tuple[Any, _Live]:
        """Return what the chunk's first layer is called with."""
        stage, m = step.stage, step.action.microbatch
        if stage == 0:
            return self._begin(self.inputs[m])
        if step.need is not None:
            form, tensors = self.part.links.form(step.need), self.part.links.take(step.need)
        else:
            form, tensors = self._down.pop((stage, m))
        wanting = form.wanting(tensors)
        for x in wanting:
            x.requires_grad_()
        return unflatten(form.names, tensors), _Live(wanting, [])

    def _begin(self, x: Any) -> tuple[Any, _Live]:
        if not (self.training and self.part.splits):
            return x, _Live([], [])
        names, tensors = flatten(x)
        wanting = [each for each in tensors if each.requires_grad]
        marked = [
            each if each.requires_grad or not each.is_floating_point() else _mark(each)
            for each in tensors
        ]
        marks = [new for new, old in zip(marked, tensors, strict=True) if new is not old]
        return unflatten(names, marked), _Live(wanting, marks)

    def _pass_on(self, step: PlannedAction, y: Any, live: _Live) -> None:
        names, tensors = flatten(y)
        form = form_of(names, tensors)
        if self.training:
            live.roots = [get_gradient_edge(each) for each in form.wanting(tensors)]
        bare = [each.detach() for each in tensors]
        if step.result is not None:
            self.part.links.send(step.result, bare, form)
        else:
            self._down[step.stage + 1, step.action.microbatch] = (form, bare)

    def _backward(self, step: PlannedAction) -> None:
        part, stage, m = self.part, step.stage, step.action.microbatch
        live = self._live.pop((stage, m))
        gradients: list[Tensor] = []
        if step.need is not None:
            gradients = part.links.take(step.need)
        elif stage < part.n_stages - 1:
            gradients = self._up.pop((stage, m))
        gradients = gradients + live.ones
        live.ones = []
        if step.action.kind == "I":
            splitter = part.splitters[step.action.chunk]
            found, rest = splitter.input_part(live.roots, gradients, live.inputs, live.marks)
            self._weights[stage, m] = rest
            if stage == 0:
                _deliver(live.inputs, found)
        else:
            if live.roots:
                accumulate(live.roots, gradients)
            found = [x.grad for x in live.inputs]
        if stage:
            pairs = zip(live.inputs, found, strict=True)
            result = [torch.zeros_like(x) if g is None else g for x, g in pairs]
            if step.result is not None:
                part.links.send(step.result, result)
            else:
                self._up[stage - 1, m] = result


def _mark(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _deliver(inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Gradients of what entered the model: to its leaves, or on through the graph it came from."""
    once = {id(x): (x, g) for x, g in zip(inputs, gradients, strict=True)}  # each has the whole
    known = [(get_gradient_edge(x), g) for x, g in once.values() if g is not None]
    if known:
        accumulate([edge for edge, _ in known], [g for _, g in known])
