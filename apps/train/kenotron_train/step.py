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
from kenotron_models import Context
from kenotron_optim import (
    LossScale,
    NonFinite,
    Slices,
    allows_update,
    clip_,
    find_nonfinite,
    learning_rate,
    unscale_,
)
from kenotron_tp import (
    linear_cross_entropy,
    linear_cross_entropy_sum,
    vocab_parallel_cross_entropy,
)
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
    loss_scale: LossScale | None = None
    """That of the next step; None unless the run is in float16."""
    overflow: bool = False
    """Whether the step was left out because gradients did not fit in float16 with its scale."""
    words: tuple[float, ...] = ()
    """What every rank had to say in this step."""


def training_step(
    training: Training,
    batch: Batch,
    step: int,
    before_update: Callable[[], None] = lambda: None,
    schedule_start: int = 0,
    look: Callable[[Slices], None] = lambda _: None,
    loss_scale: LossScale | None = None,
    word: Callable[[], float] = lambda: 0.0,
) -> StepResult:
    """Forward, backward and update of one global batch; ``step`` counts from 1.

    The learning rate is that of step ``step - schedule_start`` of its schedule.
    ``before_update`` is called before any parameter changes: a checkpoint may still be copying it.
    ``look`` is called with this rank's slices of the whole gradient, before they are clipped.
    The loss that is differentiated is multiplied by ``loss_scale``; what is reported is not. A
    gradient that is not finite, of a loss that is, then leaves the step out and makes the scale
    smaller. What ``word`` says after the backward reaches all ranks.

    Collective over the mesh. Raises ValueError when the global batch has no target, and
    FloatingPointError when loss or gradient is not finite, the scale is not to blame, and
    ``optimizer.nonfinite`` is ``error``: the parameters are then unchanged.
    """
    config = training.config.optimizer
    grad = gradient(training, batch, step, loss_scale, word, look)
    slices, norm, loss = grad.slices, grad.norm, grad.loss
    found = find_nonfinite(training.norm, slices, norm, loss.item())
    lr = learning_rate(step - schedule_start, training.schedule)
    overflow = _overflows(found, loss_scale)
    updates = not overflow and allows_update(found, config.nonfinite, step)
    if updates:
        if config.clip_grad is not None:
            clip_(slices, config.clip_grad, norm)
        before_update()
        training.optimizer.step(slices, lr)
    return StepResult(
        loss.item(),
        norm.item(),
        lr,
        found,
        not updates,
        _next(loss_scale, found, overflow),
        overflow,
        tuple(grad.words.tolist()),
    )


@dataclass(frozen=True)
class Gradient:
    """What forward and backward of a global batch gave; all but the slices is every rank's."""

    loss: Tensor
    """Scalar fp32, without the z-loss."""
    slices: Slices
    """This rank's part, of the loss itself and not of its multiple."""
    norm: Tensor
    """2-norm of all of it, fp64."""
    words: Tensor
    """What every rank had to say (W,), fp64."""


def gradient(
    training: Training,
    batch: Batch,
    step: int,
    loss_scale: LossScale | None = None,
    word: Callable[[], float] = lambda: 0.0,
    look: Callable[[Slices], None] = lambda _: None,
) -> Gradient:
    """Forward and backward of one global batch. Collective; see ``training_step``."""
    mesh = training.mesh
    count = global_count(batch, mesh, step)
    inputs = [micro.tokens_BS.flatten() for micro in batch]
    training.grads.start(len(inputs))
    contexts = contexts_of(batch, counter_key(training.config.general.seed, "dropout", step))
    extra: list[Tensor] = []
    factor = loss_scale.factor if loss_scale else 1.0
    own_loss = loss_fn(training, batch, count / factor, extra)
    loss = training.model.pipeline.run(inputs, own_loss, contexts) / factor
    slices = training.grads.finish()
    unscale_(slices, factor)
    look(slices)
    norm, words = training.norm.with_words(slices, word())
    # One rank's loss for all: what is decided from it cannot differ between ranks.
    loss = broadcast(all_reduce(loss, mesh["dp", "cp"]), mesh.world)
    if training.config.decoder.z_loss:
        loss = loss - _z_loss(mesh, extra) / factor
    return Gradient(loss, slices, norm, words)


def _next(scale: LossScale | None, found: NonFinite | None, overflow: bool) -> LossScale | None:
    """The scale of the next step; what it is not to blame for leaves it alone."""
    return scale if scale is None or (found and not overflow) else scale.after(overflow)


def _overflows(found: NonFinite | None, loss_scale: LossScale | None) -> bool:
    """Whether a smaller scale may make the gradient finite."""
    if found is None or loss_scale is None or not loss_scale.can_shrink:
        return False
    return math.isfinite(found.loss)


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


def token_losses(training: Training, x: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every token, (T,), 0 without target; x as in ``loss_fn``, T labels."""
    head, tp = training.model.head, training.mesh["tp"]
    vocab_size = training.config.decoder.vocab_size
    if head is None:
        return vocab_parallel_cross_entropy(x, labels.flatten(), tp, vocab_size=vocab_size)
    return linear_cross_entropy(
        x, head.weight, labels.flatten(), tp, vocab_size=vocab_size,
        sequence_parallel=head.sequence_parallel,
    )  # fmt: skip


def loss_fn(
    training: Training, batch: Batch, count: float, extra: list[Tensor] | None = None
) -> Callable[[Tensor, int], Tensor]:
    """Loss of a micro-batch, scaled so that the global sum is the mean.

    Its argument is the head's input (T, D), or the logits (T, V/t) of a head that is not ours. A
    z-loss, where the model has one, is in it when ``extra`` is given, and its part is put there.
    """
    tp, spec = training.mesh["tp"], training.config.decoder
    z_loss = 0.0 if extra is None else spec.z_loss

    def loss(x: Tensor, microbatch: int) -> Tensor:
        head, labels = training.model.head, batch[microbatch].labels_BS.flatten()
        options = {"vocab_size": spec.vocab_size, "z_loss": z_loss}
        if head is None:
            each = vocab_parallel_cross_entropy(x, labels, tp, **options, return_z_loss=True)
            total, z = (part.sum() / count for part in each)
        else:
            total, z = linear_cross_entropy_sum(
                x, head.weight, labels, tp, **options, times=1 / count,
                sequence_parallel=head.sequence_parallel,
            )  # fmt: skip
        if extra is not None and z_loss:
            extra.append(z)
        return total

    return loss
