"""One training step: each line is one room of the house.

Shapes: M micro-batches, B rows of a micro-batch, S sequence, T = B * S, V vocabulary; ``/t`` is
divided by tp size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_data import Batch
from kenotron_dist import Mesh, all_reduce, broadcast
from kenotron_dist.rng import counter_key
from kenotron_engine.device_read import DeviceRead
from kenotron_engine.domain_losses import (
    COLUMNS,
    DomainBatch,
    DomainLosses,
    domain_losses,
    global_rows,
    weighted_loss_fn,
)
from kenotron_engine.expert_load import (
    ExpertLoad,
    balance_experts,
    expert_loads,
    forget_loads,
)
from kenotron_engine.objective import global_counts, loss_fn, with_further
from kenotron_engine.training import Training
from kenotron_optim import (
    LossScale,
    NonFinite,
    NonFinitePolicy,
    Slices,
    SpikeGuard,
    allows_update,
    clip_coefficient,
    find_nonfinite,
    learning_rate,
    unscale_,
)


@dataclass(frozen=True)
class StepResult:
    """What a step reports; the same on every rank."""

    loss: float
    """Mean cross entropy over the targets of the global batch, in nats a token."""
    grad_norm: float
    """2-norm of the gradient before clipping."""
    lr: float
    """Learning rate of the update."""
    nonfinite: NonFinite | None = None
    """What was nan or inf; None in every ordinary step."""
    skipped: bool = False
    """Whether the step was left out: parameters, optimizer state and its step count unchanged."""
    loss_scale: LossScale | None = None
    """That of the next step; None unless the run is in float16."""
    overflow: bool = False
    """Whether the step was left out because gradients did not fit in float16 with its scale."""
    spikes: SpikeGuard | None = None
    """That of the next step; None unless spikes are left out."""
    spike: str = ""
    """Why the step was left out although it is finite; empty in every ordinary step."""
    tokens: int = 0
    """Tokens of the global batch that are no padding."""
    loads: tuple[ExpertLoad, ...] = ()
    """How tokens were spread over the experts of each layer that has some."""
    domains: DomainLosses | None = None
    """Losses by domain, of a step that weighs them."""
    mtp_loss: float | None = None
    """Cross entropy of the module that predicts the token after the next, over the targets of
    ``loss``; None: there is no such module."""


def training_step(
    training: Training,
    batch: Batch,
    step: int,
    before_update: Callable[[], None] = lambda: None,
    schedule_start: int = 0,
    look: Callable[[Slices], None] = lambda _: None,
    loss_scale: LossScale | None = None,
    spikes: SpikeGuard | None = None,
    domains: DomainBatch | None = None,
) -> StepResult:
    """Forward, backward and update of one global batch; ``step`` counts from 1.

    The learning rate is that of step ``step - schedule_start`` of its schedule.
    ``before_update`` is called after the backward and before any parameter changes: a checkpoint
    may still be copying it, and ranks may agree on something. It must not wait for the device.
    ``look`` is called with this rank's slices of the whole gradient, before they are clipped.
    The loss that is differentiated is multiplied by ``loss_scale``; what is reported is not. A
    gradient that is not finite, of a loss that is, then leaves the step out and makes the scale
    smaller. A loss or gradient norm beyond the bounds of ``spikes`` leaves the step out, too.
    ``domains`` weighs the losses of each domain (DoReMi).

    Everything is queued before this process waits for the device, once: whether parameters change
    is decided there. When it returns, parameters may still travel to other data ranks: read them
    by ``Training.parameters``. Collective over the mesh. Raises ValueError when the global batch
    has no target, and FloatingPointError when loss or gradient is not finite, the scale is not to
    blame, and ``Training.optim.nonfinite`` is ``error``: the parameters are then unchanged.
    """
    config = training.optim
    grad = gradient(training, batch, step, loss_scale, look, domains)
    lr = learning_rate(step - schedule_start, training.schedule)
    before_update()
    blocked = _blocked(grad, config.nonfinite, loss_scale, spikes)
    coefficient = clip_coefficient(grad.norm, config.clip_grad)
    training.optimizer.step(grad.slices, lr, coefficient=coefficient, blocked=blocked)
    balance = balance_experts(training, blocked)
    # The first time that this process waits for its device: everything is queued by now.
    further = [] if grad.mtp_loss is None else [grad.mtp_loss]
    (loss,), (norm,), (count, tokens), rows, *more = DeviceRead(
        [grad.loss, grad.norm, grad.counts, grad.rows, *further, *balance]
    ).wait()
    loads = more[len(further) :]
    training.model.pipeline.confirm()
    found = find_nonfinite(training.norm, grad.slices, norm, loss) if count else None
    overflow = _overflows(found, loss_scale)
    updates = count > 0 and not overflow and (found is None or config.nonfinite == "continue")
    spike = spikes.find(loss, norm) if spikes and updates else ""
    updates = updates and not spike
    _finish_update(training, updates)
    if not count:
        raise ValueError(f"step {step}: no position of the global batch has a target")
    if not overflow:
        allows_update(found, config.nonfinite, step)
    split = _by_domain(rows, domains)
    return StepResult(
        loss if split is None else split.loss, norm, lr, found, not updates,
        _next(loss_scale, found, overflow), overflow,
        spikes.after(loss, norm) if spikes else None, spike, int(tokens),
        expert_loads(training, loads), split, more[0][0] if further else None,
    )  # fmt: skip


def _finish_update(training: Training, updates: bool) -> None:
    """Tell optimizer and averages whether the step counts."""
    if not updates:
        training.optimizer.left_out()
    elif training.averages is not None:
        training.averages.update()


def _blocked(
    grad: Gradient,
    policy: NonFinitePolicy,
    loss_scale: LossScale | None,
    spikes: SpikeGuard | None,
) -> Tensor:
    """Whether the step must change nothing, decided on the device: a bool scalar.

    The host decides the same from the same numbers once it has read them.
    """
    blocked = ~(grad.norm + grad.loss).isfinite()
    if policy == "continue":  # but for gradients that a smaller loss scale can make finite
        shrinks = loss_scale is not None and loss_scale.can_shrink
        blocked = blocked & grad.loss.isfinite() if shrinks else torch.zeros_like(blocked)
    if spikes is not None:
        most_loss, most_norm = spikes.bounds
        blocked = blocked | (grad.loss.double() > most_loss) | (grad.norm > most_norm)
    return blocked | (grad.counts[0] == 0)


@dataclass(frozen=True)
class Gradient:
    """What forward and backward of a global batch gave; all but the slices is every rank's."""

    loss: Tensor
    """Scalar fp32, without the z-loss; of weighted tokens where domains are weighed."""
    slices: Slices
    """This rank's part, of the loss itself and not of its multiple."""
    norm: Tensor
    """2-norm of all of it, fp64."""
    counts: Tensor
    """Targets and real tokens of the global batch (2,), int64."""
    rows: Tensor
    """What ``domain_losses`` adds up (G, 4), fp64; empty unless domains are weighed."""
    mtp_loss: Tensor | None = None
    """Scalar, of the module that predicts the token after the next; None: there is none."""


def gradient(
    training: Training,
    batch: Batch,
    step: int,
    loss_scale: LossScale | None = None,
    look: Callable[[Slices], None] = lambda _: None,
    domains: DomainBatch | None = None,
) -> Gradient:
    """Forward and backward of one global batch. Collective; see ``training_step``."""
    mesh = training.mesh
    forget_loads(training)
    counts = global_counts(batch, mesh)
    extra: list[Tensor] = []
    factor = loss_scale.factor if loss_scale else 1.0
    count = counts[0].double() / factor
    key = counter_key(training.plan.seed, "dropout", step)
    rows = batch.tokens_MBS.new_zeros((*batch.samples_MB.shape, COLUMNS - 1), dtype=torch.float64)

    def run(batch: Batch, count: Tensor, extra: list[Tensor]) -> Tensor:
        share = training.share_of(batch, key, counts[1].double() / factor)
        if domains is None:
            own_loss = loss_fn(training, share.micros, count, extra)
            own_loss = with_further(training, own_loss, share, count, extra)
        else:
            own_loss = weighted_loss_fn(training, share.micros, domains, count, extra, rows)
        return training.model.pipeline.run(share.inputs, own_loss, share.contexts)

    if training.graphs is not None:  # a replay runs no hook, and a capture must not record one
        training.optimizer.wait_for_parameters()
    if training.graphs is not None and training.graphs.usable and domains is None:
        loss = training.graphs.run(batch, count, run, extra) / factor
    else:
        training.grads.start(len(batch))
        loss = run(batch, count, extra) / factor
    slices = training.grads.finish()
    unscale_(slices, factor)
    look(slices)
    norm = training.norm(slices)
    # One rank's loss for all: what is decided from it cannot differ between ranks.
    loss = broadcast(all_reduce(loss, mesh["dp", "cp"]), mesh.world)
    spec, further = training.plan.spec, None
    if spec.mtp_weight:
        z_loss, further = (_of_all(mesh, extra, (2,)) / factor).unbind()
        loss = loss - z_loss
    elif spec.z_loss:
        loss = loss - _of_all(mesh, extra, ()) / factor
    own = rows.new_empty(0) if domains is None else global_rows(batch, rows, mesh)
    return Gradient(loss, slices, norm, counts, own, further)


def _by_domain(rows: list[float], domains: DomainBatch | None) -> DomainLosses | None:
    return None if domains is None else domain_losses(rows, domains.factors)


def _next(scale: LossScale | None, found: NonFinite | None, overflow: bool) -> LossScale | None:
    """The scale of the next step; causes other than the scale leave it alone."""
    return scale if scale is None or (found and not overflow) else scale.after(overflow)


def _overflows(found: NonFinite | None, loss_scale: LossScale | None) -> bool:
    """Whether a smaller scale may make the gradient finite."""
    if found is None or loss_scale is None or not loss_scale.can_shrink:
        return False
    return math.isfinite(found.loss)


def _of_all(mesh: Mesh, extra: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Sums over the global batch, on all ranks; the last stage's have ``extra`` of them."""
    own = torch.stack(extra).sum(0) if extra else torch.zeros(shape, device=mesh.device)
    return all_reduce(own, mesh["pp", "dp", "cp"])
