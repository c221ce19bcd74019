"""The objective: token losses, and the number of targets of the global batch that divides them.

Shapes: M micro-batches, B rows of a micro-batch, S sequence, T = B * S, V vocabulary; ``/t`` is
divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kenotron_data import Batch, MicroBatch
from kenotron_dist import Mesh, all_reduce
from kenotron_engine.model_on_mesh import ModelOnMesh
from kenotron_engine.sequence import NO_TARGET, Share
from kenotron_engine.training import Training
from kenotron_tp import (
    linear_cross_entropy,
    linear_cross_entropy_sum,
    vocab_parallel_cross_entropy,
)


def global_counts(batch: Batch, mesh: Mesh) -> Tensor:
    """Targets of the global batch, by which every loss is divided, and its tokens but padding.

    (2,) int64 on the device. ``batch`` has whole rows, which all ranks of cp read. Collective over
    dp.
    """
    targets = (batch.labels_MBS != NO_TARGET).sum()
    real = (batch.samples_MB >= 0)[..., None].expand_as(batch.tokens_MBS)
    if batch.documents_MBS is not None:
        real = real & (batch.documents_MBS >= 0)
    own = torch.stack([targets, real.sum()]).to(mesh.device)
    return all_reduce(own, mesh["dp"])


def token_losses(model: ModelOnMesh, x: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of every token, (T,), 0 without target; x as in ``loss_fn``, T labels."""
    return losses_and_z(model, x, labels, 0.0)[0]


def losses_and_z(
    model: ModelOnMesh, x: Tensor, labels: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Loss of every token (T,) and the z-loss in it, which has no gradient of its own.

    Both are 0 without target. ``x`` and ``labels`` as in ``token_losses``.
    """
    head, tp, own = model.model.head, model.mesh["tp"], labels.flatten()
    vocab_size = model.plan.spec.vocab_size
    if head is None:
        return vocab_parallel_cross_entropy(
            x, own, tp, vocab_size=vocab_size, z_loss=z_loss, return_z_loss=True
        )
    return linear_cross_entropy(
        x, head.weight, own, tp, vocab_size=vocab_size, z_loss=z_loss, return_z_loss=True,
        sequence_parallel=head.sequence_parallel, cap=head.cap,
    )  # fmt: skip


def loss_fn(
    training: Training,
    batch: Batch | Sequence[MicroBatch],
    count: Tensor,
    extra: list[Tensor] | None = None,
) -> Callable[[Tensor, int], Tensor]:
    """Loss of a micro-batch, divided by ``count`` (scalar): the global sum is then the mean.

    Its argument is the head's input (T, D), or the logits (T, V/t) of a head that is not ours. A
    z-loss, where the model has one, is in it when ``extra`` is given, and its part is put there.
    """
    tp, spec = training.mesh["tp"], training.plan.spec
    z_loss = 0.0 if extra is None else spec.z_loss
    times = 1 / count.double()

    def loss(x: Tensor, microbatch: int) -> Tensor:
        head, labels = training.model.head, batch[microbatch].labels_BS.flatten()
        options = {"vocab_size": spec.vocab_size, "z_loss": z_loss}
        if head is None:
            each = vocab_parallel_cross_entropy(x, labels, tp, **options, return_z_loss=True)
            total, z = (part.sum() / count.to(part.dtype) for part in each)
        else:
            total, z = linear_cross_entropy_sum(
                x, head.weight, labels, tp, **options, times=times,
                sequence_parallel=head.sequence_parallel, cap=head.cap,
            )  # fmt: skip
        if extra is not None and z_loss:
            extra.append(z)
        return total

    return loss


def with_further(
    training: Training,
    main: Callable[[Tensor, int], Tensor],
    share: Share,
    count: Tensor,
    extra: list[Tensor],
) -> Callable[[Tensor, int], Tensor]:
    """Add the gradient of the module that predicts the token after the next to a loss.

    Its cross entropy, divided by ``count``, has the head and the weight of ``DecoderSpec``. It adds
    a gradient to the loss, and 0 to its value.

    Args:
        training: the model, which has the module.
        main: loss of the main stream (T, D) of a micro-batch.
        share: with the labels of the module; without them ``main`` is returned.
        count: targets of the global batch, by which losses are divided, a scalar.
        extra: takes a tensor (2,) of each micro-batch: its z-loss, which ``main`` has put there, or
            0, and the cross entropy of the module.

    Returns:
        The loss of head inputs (2T, D): those of the main stream, then those of the module.
    """
    if not share.further:
        return main
    spec, times = training.plan.spec, 1 / count.double()

    def loss(x: Tensor, microbatch: int) -> Tensor:
        head, before = training.model.head, len(extra)
        assert head is not None  # the module is only in decoders that have it
        own, ahead = x.chunk(2)
        total = main(own, microbatch)
        further, _ = linear_cross_entropy_sum(
            ahead, head.weight, share.further[microbatch].flatten(), training.mesh["tp"],
            vocab_size=spec.vocab_size, times=times, sequence_parallel=head.sequence_parallel,
            cap=head.cap,
        )  # fmt: skip
        value = further.detach()
        z = extra.pop() if len(extra) > before else torch.zeros_like(value)
        extra.append(torch.stack([z, value]))
        return total + spec.mtp_weight * (further - value)

    return loss
