"""One training step: each line is one room of the house.

Shapes: M micro-batches, B rows of a micro-batch, S sequence, T = B * S, V vocabulary; ``/t`` is
divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_data import Batch
from kenotron_dist import Mesh, all_reduce, broadcast
from kenotron_dist.rng import counter_key
from kenotron_models import Context
from kenotron_optim import (
    NonFinite,
    Slices,
    allows_update,
    clip_,
    find_nonfinite,
    learning_rate,
)
from kenotron_tp import linear_cross_entropy, linear_cross_entropy_sum
from kenotron_train.assemble import Training

NO_TARGET = -100


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


def training_step(
    training: Training,
    batch: Batch,
    step: int,
    before_update: Callable[[], None] = lambda: None,
    schedule_start: int = 0,
    look: Callable[[Slices], None] = lambda _: None,
) -> StepResult:
    """Forward, backward and update of one global batch; ``step`` counts from 1.

    The learning rate is that of step ``step - schedule_start`` of its schedule.
    ``before_update`` is called before any parameter changes: a checkpoint may still be copying it.
    ``look`` is called with this rank's slices of the whole gradient, before they are clipped.

    Collective over the mesh. Raises ValueError when the global batch has no target, and
    FloatingPointError when loss or gradient is not finite and ``optimizer.nonfinite`` is
    ``error``: the parameters are then unchanged.
    """
    mesh, config = training.mesh, training.config.optimizer
    count = global_count(batch, mesh, step)
    inputs = [micro.tokens_BS.flatten() for micro in batch]
    training.grads.start(len(inputs))
    contexts = contexts_of(batch, counter_key(training.config.general.seed, "dropout", step))
    extra: list[Tensor] = []
    loss = training.model.pipeline.run(inputs, loss_fn(training, batch, count, extra), contexts)
    slices = training.grads.finish()
    look(slices)
    norm = training.norm(slices)
    # One rank's loss for all: what is decided from it cannot differ between ranks.
    loss = broadcast(all_reduce(loss, mesh["dp", "cp"]), mesh.world)
    if training.config.decoder.z_loss:
        loss = loss - _z_loss(mesh, extra)
    found = find_nonfinite(training.norm, slices, norm, loss.item())
    lr = learning_rate(step - schedule_start, training.schedule)
    updates = allows_update(found, config.nonfinite, step)
    if updates:
        if config.clip_grad is not None:
            clip_(slices, config.clip_grad, norm)
        before_update()
        training.optimizer.step(slices, lr)
    return StepResult(loss.item(), norm.item(), lr, found, not updates)


def _z_loss(mesh: Mesh, extra: list[Tensor]) -> Tensor:
    """The z-loss of the global batch, on all ranks; the last stage's have ``extra`` of it."""
    own = torch.stack(extra).sum() if extra else torch.zeros((), device=mesh.device)
    return all_reduce(own, mesh["pp", "dp", "cp"])


def contexts_of(batch: Batch, dropout_key: int | None = None) -> list[Context]:
    """What the layers may read of each micro-batch; without a key they drop nothing.

    The head's product is left to the loss.
    """
    return [
        Context(micro.positions_BS, micro.samples_B, dropout_key, to_loss=True) for micro in batch
    ]


def global_count(batch: Batch, mesh: Mesh, step: int) -> int:
    """Targets of the global batch: what every loss is divided by.

    Raises ValueError naming the step when there is none.
    """
    own = (batch.labels_MBS != NO_TARGET).sum().to(mesh.device)
    count = int(all_reduce(own, mesh["dp", "cp"]))
    if count == 0:
        raise ValueError(f"step {step}: no position of the global batch has a target")
    return count


def real_tokens(batch: Batch, mesh: Mesh) -> int:
    """Tokens of the global batch that are no padding. Collective over dp and cp."""
    real = (batch.samples_MB >= 0)[..., None].expand_as(batch.tokens_MBS)
    if batch.documents_MBS is not None:
        real = real & (batch.documents_MBS >= 0)
    return int(all_reduce(real.sum().to(mesh.device), mesh["dp", "cp"]))


def token_losses(training: Training, hidden: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every token, (T,), 0 without target; head's input (T, D), T labels."""
    head, spec = training.model.head, training.config.decoder
    return linear_cross_entropy(
        hidden, head.weight, labels.flatten(), training.mesh["tp"], vocab_size=spec.vocab_size,
        sequence_parallel=head.sequence_parallel,
    )  # fmt: skip


def loss_fn(
    training: Training, batch: Batch, count: int, extra: list[Tensor] | None = None
) -> Callable[[Tensor, int], Tensor]:
    """Loss of a micro-batch from the head's input, scaled so that the global sum is the mean.

    A z-loss, where the model has one, is in it when ``extra`` is given, and its part is put there.
    """
    tp, spec = training.mesh["tp"], training.config.decoder
    z_loss = 0.0 if extra is None else spec.z_loss

    def loss(hidden: Tensor, microbatch: int) -> Tensor:
        head = training.model.head
        total, z = linear_cross_entropy_sum(
            hidden, head.weight, batch[microbatch].labels_BS.flatten(), tp,
            vocab_size=spec.vocab_size, z_loss=z_loss, sequence_parallel=head.sequence_parallel,
        )  # fmt: skip
        if extra is not None and z_loss:
            extra.append(z / count)
        return total / count

    return loss
