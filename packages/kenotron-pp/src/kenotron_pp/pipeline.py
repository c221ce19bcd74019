"""The executor: one rank's chunks of a model, run by any schedule.

Micro-batches enter on every rank (the loader gives all stages the same rows): the first stage
computes with them, the others read only their shape and their context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kenotron_dist import Axis, gather_objects, host_numbers, settle
from kenotron_pp.activation import Activation
from kenotron_pp.comm_plan import RankPlan, make_plan
from kenotron_pp.executor import Entering, LossFn, Over, PipelineRun, StagePart
from kenotron_pp.failure import Alarm
from kenotron_pp.losses import Losses, SharedLoss, adding
from kenotron_pp.p2p import Links, Pairs
from kenotron_pp.schedule import Order, Schedule, as_schedule, one_f_one_b

T = TypeVar("T")

Layer = nn.Module | tuple[str, nn.Module]
"""A layer, or a name and a layer."""


class Pipeline:
    """This rank's layers as one or several stages of a pipeline.

    Collective over the axis: where a backend makes communicators at their first use, they are made
    here.

    Args:
        layers: this rank's layers in order; where the schedule has several chunks a rank, one
            collection of layers for each. What ``Stages.own`` and ``Stages.chunks`` return, layers
            with their names, will do, too. A layer is called with the activation, or with the
            activation and the micro-batch's context when contexts are given, and returns one: a
            tensor, or a tuple or dict of tensors.
        axis: the pp axis; size 1 runs everything here.
        schedule: order of forwards and backwards, the same on every rank.
        device: where activations live (default: where this rank's parameters are).
        pairs: a group for each pair of neighbours and direction (``mesh.pairs("pp")``). NCCL runs
            all transfers of a group in one order, so that two directions over one group would
            deadlock; on gloo ``axis`` itself serves all of them, which is the default.
        closes: further axes whose groups are closed when this rank fails, because ranks of other
            pipelines wait for it there (tp, dp).
        settles: whether a training run, too, ends by waiting for the device, where a failure of
            another rank shows only then (NCCL). Otherwise the caller waits for its numbers and then
            calls ``confirm``, so that a step waits once.
        entering: makes what a stage (by number) passes on of the input and context of a micro-batch
            where no rank is there to send its form (``Mesh.connect(backend="fake")``).
        adds: whether a layer of any rank adds a loss of its own; None: ranks ask one another.

    Raises:
        ValueError: the chunks do not fit the schedule, or a backend needs ``pairs``.
    """

    def __init__(
        self,
        layers: Iterable[Layer] | Sequence[Iterable[Layer]],
        axis: Axis,
        schedule: Schedule | Order = one_f_one_b,
        device: torch.device | str | None = None,
        pairs: Pairs | None = None,
        closes: Iterable[Axis] = (),
        settles: bool = True,
        entering: Entering | None = None,
        adds: bool | None = None,
    ) -> None:
        self.axis, self.schedule = axis, as_schedule(schedule)
        self.chunks = _chunks(layers, self.schedule)
        self.layers = [layer for chunk in self.chunks for layer in chunk]
        self.device = torch.device(device) if device is not None else _device_of(self.layers, axis)
        self.n_stages = axis.size * self.schedule.chunks
        links = Links(axis, pairs, self.n_stages, self.device)
        if axis.on_device:
            links.touch(self.schedule.neighbours(axis.size))
        splits = self.schedule.splits
        self._part = StagePart(self.chunks, self.n_stages, splits, links, self.device, entering)
        self.losses: Losses | None = None
        """Of the last run: the total that ``run`` returned, and its two parts."""
        self._alarm = Alarm(axis, [axis, *(pairs or {}).values(), *closes])
        self._adding = list(adding(self.layers))
        self._plans: dict[tuple[int, bool], RankPlan] = {}
        self._all_add = adds
        self._settles = settles

    @property
    def broken(self) -> str:
        """Reason why no step can run any more: the cause of a failure. Empty while all is well."""
        return self._alarm.broken

    @property
    def is_last(self) -> bool:
        """True where this rank has the last layer, and so the loss and the outputs."""
        return self.last_rank == self.axis.rank

    def run(
        self,
        inputs: Sequence[Activation],
        loss_fn: LossFn,
        contexts: Sequence[Any] | None = None,
        over: Over | None = None,
    ) -> Tensor:
        """Forward and backward of all micro-batches; gradients land on the parameters.

        Args:
            inputs: of the first layer, per micro-batch: a tensor, or a tuple or dict of them.
            loss_fn: loss of each, already scaled so that their sum is the loss of the batch.
            contexts: values that the layers may read next to it, per micro-batch.
            over: called with a micro-batch's number when this rank has done its last action.

        Returns:
            The sum of the losses, auxiliary ones included, the same detached scalar on every rank.

        Raises:
            PipelineError: on all ranks, when one of them fails (with one rank: its exception).
        """
        return self._guarded(inputs, contexts, loss_fn, self._train, over, training=True)

    def confirm(self) -> None:
        """Raise PipelineError when another rank has failed in the last run.

        Its numbers mean nothing then. Call it once they have been waited for.
        """
        try:
            self._alarm.confirm()
        except RuntimeError as error:
            raise self._alarm.raised(error, "after its last action") from error

    @torch.no_grad()
    def forward(
        self, inputs: Sequence[Activation], contexts: Sequence[Any] | None = None
    ) -> list[Any]:
        """Outputs of the last layer for every micro-batch, without gradients.

        They are where the last layer is (``is_last``); elsewhere the list is empty. Raises as
        ``run`` does.
        """
        return self._guarded(inputs, contexts, None, lambda run: run.outputs)

    @torch.no_grad()
    def evaluate(
        self,
        inputs: Sequence[Activation],
        loss_fn: LossFn,
        contexts: Sequence[Any] | None = None,
    ) -> Tensor:
        """Return the sum of the losses, a scalar, without auxiliary ones; equal on all ranks.

        No gradients. Each output is freed when its loss is known. Arguments and errors are those of
        ``run``.
        """
        return self._guarded(inputs, contexts, loss_fn, lambda run: run.shared.arrive(run.loss))

    def _guarded(
        self,
        inputs: Sequence[Activation],
        contexts: Sequence[Any] | None,
        loss_fn: LossFn | None,
        finish: Callable[[PipelineRun], T],
        over: Over | None = None,
        *,
        training: bool = False,
    ) -> T:
        """Run the actions of one step; whatever is raised ends it on all ranks."""
        self._alarm.check()
        _check(inputs, contexts)  # equal on all ranks: nothing is lost yet
        run: PipelineRun | None = None
        try:
            plan = self._plan(len(inputs), forward_only=not training)
            shared = SharedLoss(self.axis, self.last_rank)
            run = PipelineRun(
                self._part, plan, inputs, contexts, loss_fn, shared, over, training=training
            )
            if run.training:
                self._attach()
            run.run()
            result = finish(run)
            if self.axis.size > 1 and (self._settles or not training):
                settle(self.axis)
            self._alarm.confirm()
            return result
        except BaseException as error:
            where = "before its first action" if run is None else run.where
            raised = self._alarm.raised(error, where)
            if raised is error:
                raise
            raise raised from error
        finally:
            if training:
                self._detach()

    def _attach(self) -> None:
        """Give layers what they ask for while a training run lasts."""
        for layer in self._adding:
            setattr(layer, "auxiliary_losses", self._part.auxiliary)  # noqa: B010 - see losses.py
        if self.schedule.splits:
            for splitter in self._part.splitters:
                splitter.attach()

    def _detach(self) -> None:
        self._part.auxiliary.close()
        for layer in self._adding:
            setattr(layer, "auxiliary_losses", None)  # noqa: B010
        for splitter in self._part.splitters:
            splitter.detach()

    def _train(self, run: PipelineRun) -> Tensor:
        main = run.shared.arrive(run.loss)
        added = torch.full((), self._added(run), dtype=torch.float32, device=self.device)
        self.losses = Losses(main + added, main, added)
        return self.losses.total

    def _added(self, run: PipelineRun) -> float:
        """Sum of all ranks' auxiliary losses, exact, so that it does not depend on the layout."""
        if self._all_add is None:
            own = bool(self._adding)
            self._all_add = any(gather_objects(own, self.axis)) if self.axis.size > 1 else own
        if not self._all_add:
            return 0.0
        values = host_numbers([value for _, _, scalars in run.scalars for value in scalars])
        gathered = gather_objects(values, self.axis) if self.axis.size > 1 else [values]
        return math.fsum(value for part in gathered for value in part)

    @property
    def last_rank(self) -> int:
        """Index along the axis of the rank that has the last layer."""
        return self.schedule.place(self.n_stages - 1, self.axis.size)[0]

    def _plan(self, microbatches: int, *, forward_only: bool) -> RankPlan:
        known = (microbatches, forward_only)
        if known not in self._plans:
            self._check_alike(microbatches)
            self._plans[known] = make_plan(
                self.schedule, self.axis.rank, self.axis.size, microbatches,
                forward_only=forward_only,
            )  # fmt: skip
        return self._plans[known]

    def _check_alike(self, microbatches: int) -> None:
        if self.axis.size == 1:
            return
        counts = gather_objects(microbatches, self.axis)
        if len(set(counts)) > 1:
            raise ValueError(
                f"the ranks of the {self.axis.name} axis were given {counts} micro-batches: give "
                "every rank the same inputs"
            )


def _chunks(layers: Iterable[Any], schedule: Schedule) -> list[list[nn.Module]]:
    given = list(layers)
    if schedule.chunks == 1 and not (len(given) == 1 and isinstance(given[0], list)):
        given = [given]
    if len(given) != schedule.chunks or not all(isinstance(chunk, Iterable) for chunk in given):
        raise ValueError(
            f"schedule {schedule.name} has {schedule.chunks} chunks a rank: give one list of "
            f"layers for each, not {len(given)} {'layers' if given else 'lists'}"
        )
    return [[_layer(each, schedule) for each in chunk] for chunk in given]


def _layer(given: Any, schedule: Schedule) -> nn.Module:
    """A layer that may come with its name, as ``Stages`` hands them out."""
    layer = given[1] if isinstance(given, tuple) and len(given) == 2 else given
    if not isinstance(layer, nn.Module):
        raise ValueError(
            f"schedule {schedule.name} has {schedule.chunks} chunk(s) a rank: give layers, or one "
            f"list of layers for each chunk, not {type(layer).__name__}"
        )
    return layer


def _device_of(layers: Iterable[nn.Module], axis: Axis) -> torch.device:
    """Return the parameters' device; without any, that on which the axis' backend wants tensors."""
    parameters = (each for layer in layers for each in layer.parameters())
    first = next(parameters, None)
    return axis.control_device if first is None else first.device


def _check(inputs: Sequence[Any], contexts: Sequence[Any] | None) -> None:
    for given, name in ((inputs, "inputs"), (contexts, "contexts")):
        if isinstance(given, Tensor):
            raise ValueError(
                f"{name} is one tensor {tuple(given.shape)}: give a list with one entry for each "
                "micro-batch, such as batch.chunk(4)"
            )
    if not len(inputs):
        raise ValueError("there are no micro-batches: give at least one input")
    if contexts is not None and len(contexts) != len(inputs):
        raise ValueError(
            f"{len(inputs)} micro-batches were given {len(contexts)} contexts: give one each, or "
            "none at all"
        )
