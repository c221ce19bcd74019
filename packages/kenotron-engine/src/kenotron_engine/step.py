"""One training step: forward and backward, norm, update, and one read of the device.

Shapes: M micro-batches, B rows of a micro-batch, G rows of the global batch, S sequence, r reports
and c numbers of a row, as the objective has them; C virtual chunks of a row, 1 without them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kenotron_data import Batch
from kenotron_dist import Mesh, all_gather, all_reduce, broadcast
from kenotron_dist.rng import counter_key
from kenotron_engine.device_read import DeviceRead
from kenotron_engine.expert_load import balance_experts, expert_figures, forget_loads
from kenotron_engine.objective import Objective, Parts
from kenotron_engine.sample_order import one_by_one, rows_of_all, sum_of_rows
from kenotron_engine.sequence import Share
from kenotron_engine.training import Training
from kenotron_models import split_chunks
from kenotron_optim import (
    NonFinite,
    NonFinitePolicy,
    Slices,
    StepState,
    allows_update,
    clip_coefficient,
    find_nonfinite,
    learning_rate,
    unscale_,
)

STATELESS = StepState()
"""Of a step about which no policy decides."""


@dataclass(frozen=True)
class StepResult:
    """Results that a step reports; the same on every rank."""

    loss: float
    """Mean cross entropy over the targets of the global batch, in nats a token; or what another
    objective reports."""
    grad_norm: float
    """2-norm of the gradient before clipping."""
    lr: float
    """Learning rate of the update."""
    minimised: float = math.nan
    """The loss that was differentiated, without parts that are not reported."""
    nonfinite: NonFinite | None = None
    """Loss or gradient that was nan or inf; None in every ordinary step."""
    skipped: bool = False
    """True where the step was left out: parameters, optimizer state and its step count
    unchanged."""
    overflow: bool = False
    """True where the step was left out because gradients did not fit in float16 with its scale."""
    reason: str = ""
    """Reason why the step was left out although it is finite; empty in every ordinary step."""
    tokens: int = 0
    """Tokens of the global batch that are no padding."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Further numbers by name: those of the objective, and "experts" by layer; hooks may add."""

    @property
    def is_finite(self) -> bool:
        """True where loss and gradient were finite."""
        return self.nonfinite is None

    def in_short(self) -> StepResult:
        """Return the result without figures that are as many as there are layers or domains."""
        short = {name: x for name, x in self.figures.items() if isinstance(x, float)}
        return replace(self, figures=short)


def training_step(
    training: Training,
    batch: Batch,
    step: int,
    before_update: Callable[[], None] = lambda: None,
    schedule_start: int = 0,
    look: Callable[[Slices], None] = lambda _: None,
    state: StepState = STATELESS,
    objective: Objective | None = None,
) -> StepResult:
    """Forward, backward and update of one global batch; ``step`` counts from 1.

    The learning rate is that of step ``step - schedule_start`` of its schedule.
    ``before_update`` is called after the backward and before any parameter changes: a checkpoint
    may still be copying it, and ranks may agree on something. It must not wait for the device.
    ``look`` is called with this rank's slices of the whole gradient, before they are clipped.
    ``state`` decides whether the step changes anything, and what the loss is multiplied by; what is
    reported is not multiplied. That of the next step is ``state.after(result)``.
    ``objective`` is what this step makes small, in place of ``training.objective``.

    Everything is queued before this process waits for the device, once: whether parameters change
    is decided there. When it returns, parameters may still travel to other data ranks: read them
    by ``Training.parameters``. Collective over the mesh. Raises ValueError when the global batch
    has no target, and FloatingPointError when loss or gradient is not finite, no policy is to
    blame, and ``Training.optim.nonfinite`` is ``error``: the parameters are then unchanged.
    """
    config, objective = training.optim, objective or training.objective
    grad = gradient(training, batch, step, state, look, objective)
    lr = learning_rate(step - schedule_start, training.schedule)
    before_update()
    blocked = _blocked(grad, config.nonfinite, state)
    coefficient = clip_coefficient(grad.norm, config.clip_grad)
    training.optimizer.step(grad.slices, lr, coefficient=coefficient, blocked=blocked)
    balance = balance_experts(training, blocked)
    # The first time that this process waits for its device: everything is queued by now.
    (loss,), (norm,), (count, tokens), reports, rows, *loads = DeviceRead(
        [grad.loss, grad.norm, grad.counts, grad.reports, grad.rows, *balance]
    ).wait()
    training.model.pipeline.confirm()
    found = find_nonfinite(training.norm, grad.slices, norm, loss) if count else None
    overflow = found is not None and state.may_overflow and math.isfinite(found.loss)
    updates = count > 0 and not overflow and (found is None or config.nonfinite == "continue")
    reason = state.reason(loss, norm) if updates else ""
    updates = updates and not reason
    _finish_update(training, updates)
    if not count:
        raise ValueError(f"step {step}: no position of the global batch has a target")
    if not overflow:
        allows_update(found, config.nonfinite, step)
    reported, figures = objective.outcome(loss, reports, rows)
    return StepResult(
        reported, norm, lr, loss, nonfinite=found, skipped=not updates, overflow=overflow,
        reason=reason, tokens=int(tokens), figures=figures | expert_figures(training, loads),
    )  # fmt: skip


def _finish_update(training: Training, updates: bool) -> None:
    """Tell optimizer and averages whether the step counts."""
    if not updates:
        training.optimizer.left_out()
    elif training.averages is not None:
        training.averages.update()


def _blocked(grad: Gradient, policy: NonFinitePolicy, state: StepState) -> Tensor:
    """Return whether the step must change nothing, decided on the device: a bool scalar.

    The host decides the same from the same numbers once it has read them.
    """
    blocked = ~(grad.norm + grad.loss).isfinite()
    if policy == "continue":  # but for gradients that a smaller loss scale can make finite
        shrinks = state.may_overflow
        blocked = blocked & grad.loss.isfinite() if shrinks else torch.zeros_like(blocked)
    for each in state.blocks(grad.loss, grad.norm):
        blocked = blocked | each
    return blocked | (grad.counts[0] == 0)


@dataclass(frozen=True)
class Gradient:
    """Result of forward and backward of a global batch; all but the slices is every rank's."""

    loss: Tensor
    """Scalar fp32, without parts that are not reported."""
    slices: Slices
    """This rank's part, of the loss itself and not of its multiple."""
    norm: Tensor
    """2-norm of all of it, fp64."""
    counts: Tensor
    """Divisor of the loss, and real tokens of the global batch (2,), int64."""
    reports: Tensor
    """(r,) the objective's, fp32."""
    rows: Tensor
    """(G, 1 + c) of each row its source and the objective's numbers, fp64; empty without them."""


def gradient(
    training: Training,
    batch: Batch,
    step: int,
    state: StepState = STATELESS,
    look: Callable[[Slices], None] = lambda _: None,
    objective: Objective | None = None,
) -> Gradient:
    """Forward and backward of one global batch. Collective; see ``training_step``."""
    mesh, goal = training.mesh, objective or training.objective
    batch = one_by_one(batch) if training.plan.reproducible else batch
    forget_loads(training)
    counts, factor = goal.counts(batch, mesh), state.loss_factor
    count = counts[0].double() / factor
    key = counter_key(training.plan.seed, "dropout", step)
    shape = *batch.samples_MB.shape, training.plan.virtual_chunks, goal.columns
    rows = batch.tokens_MBS.new_zeros(shape, dtype=torch.float64)

    def run(batch: Batch, count: Tensor) -> tuple[Tensor, list[Tensor]]:
        share = training.share_of(batch, key, counts[1].double() / factor)
        parts_of = [goal.loss(*part, count) for part in training.own_chunks(share)]
        first = mesh["cp"].rank * len(parts_of) if len(parts_of) < shape[2] else 0
        reports = list[Tensor]()

        def chunk_loss(x: Tensor, microbatch: int, chunk: int = 0) -> Tensor:
            if not isinstance(parts := parts_of[chunk](x, microbatch), Parts):
                raise TypeError(
                    f"the loss of {type(goal).__name__} returned {type(parts).__name__}: return "
                    "Parts(total), see Objective.loss"
                )
            if sums := [*parts.reports, *(parts.total,) * training.plan.reproducible]:
                own = [each.detach().float()[None] for each in sums]
                reports.append(torch.cat(own) if len(own) > 1 else own[0])
            if parts.rows is not None:
                rows[microbatch, :, first + chunk] += parts.rows.detach()
            return parts.total

        def own_loss(x: Tensor, microbatch: int) -> Tensor:
            if training.plan.virtual_chunks == 1:
                return chunk_loss(x, microbatch)
            chunks = enumerate(split_chunks(x, len(parts_of)))
            return torch.stack([chunk_loss(own, microbatch, i) for i, own in chunks]).sum()

        return _run(training, share, own_loss), reports

    if training.graphs is not None:  # a replay runs no hook, and a capture must not record one
        training.optimizer.wait_for_parameters()
    if training.graphs is not None and training.graphs.usable and not goal.columns:
        loss, found = training.graphs.run(batch, count, run)
    else:
        training.grads.start(len(batch))
        loss, found = run(batch, count)
    slices = training.grads.finish()
    unscale_(slices, factor)
    look(slices)
    norm = training.norm(slices)
    loss, reports = _sums(training, loss, found, len(batch), len(goal.reports))
    loss, reports = loss / factor, reports / factor
    own = _gathered_rows(batch, rows, mesh) if goal.columns else rows.new_empty(0)
    return Gradient(goal.reported(loss, reports), slices, norm, counts, reports, own)


def _run(training: Training, share: Share, loss: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Forward and backward of a rank's share, whose contexts are empty afterwards."""

    def over(m: int) -> None:
        share.contexts[m].forget()

    return training.model.pipeline.run(share.inputs, loss, share.contexts, over)


def _sums(
    training: Training, loss: Tensor, found: list[Tensor], microbatches: int, size: int
) -> tuple[Tensor, Tensor]:
    """Loss (scalar) and reports (r,) of the global batch, on all ranks.

    Args:
        training: its mesh, over which it is collective.
        loss: of this rank's micro-batches.
        found: on the last stage the reports of each micro-batch; in reproducible mode its loss,
            too.
        microbatches: of this rank.
        size: r.
    """
    mesh = training.mesh
    if training.plan.reproducible:
        chunks = training.plan.virtual_chunks
        total = sum_of_rows(rows_of_all(mesh, found, microbatches, size + 1, chunks)).float()
        return total[size], total[:size]
    # One rank's loss for all: what is decided from it cannot differ between ranks.
    loss, own = broadcast(all_reduce(loss, mesh["dp", "cp"]), mesh.world), loss.new_empty(0)
    if size:
        own = torch.stack(found).sum(0) if found else torch.zeros(size, device=mesh.device)
        own = all_reduce(own, mesh["pp", "dp", "cp"])
    return loss, own


def _gathered_rows(batch: Batch, rows_MBCc: Tensor, mesh: Mesh) -> Tensor:
    """The source of each row of the global batch and its numbers: (G, 1 + c), on every rank.

    ``rows_MBCc``: of each chunk; zeros on ranks without it, or without the last layer. Collective
    over the mesh.
    """
    sources = batch.sources_MB
    tags = torch.zeros_like(batch.samples_MB) if sources is None else sources
    own = all_reduce(all_reduce(rows_MBCc, mesh["cp"]), mesh["pp"]).flatten(0, 1)
    own = sum_of_rows(own.transpose(0, 1))
    tagged = torch.cat([tags.flatten()[:, None].double(), own], dim=1)
    # One rank's for all: what is decided from them cannot differ between ranks.
    return broadcast(all_gather(tagged, mesh["dp"]), mesh.world)
