"""Cross entropy of logits cut over the vocabulary, without gathering them.

Shapes: ``...`` any leading dims (B, S or T), V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kenotron_dist import Axis, all_reduce


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, axis: Axis, vocab_size: int, ignore_index: int
    ) -> Tensor:
        width = logits.shape[-1]
        first = axis.rank * width
        real = min(max(vocab_size - first, 0), width)  # columns before the padding
        x = logits.float()
        if x is logits:
            x = x.clone()
        x[..., real:] = -torch.inf
        x -= all_reduce(x.amax(-1), axis, op="max").unsqueeze(-1)
        own = labels - first
        foreign = (own < 0) | (own >= real)
        own = own.masked_fill(foreign, 0).unsqueeze(-1)
        target = x.gather(-1, own).squeeze(-1).masked_fill(foreign, 0.0)
        x.exp_()
        found = torch.where(foreign, 0.0, 1.0)
        total, target, found = all_reduce(torch.stack([x.sum(-1), target, found]), axis).unbind()
        ignored = labels == ignore_index
        x /= total.unsqueeze(-1)
        ctx.save_for_backward(x, own, foreign, ignored)
        ctx.dtype = logits.dtype
        loss = (total.log() - target).masked_fill(found == 0, torch.nan)
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, own, foreign, ignored = ctx.saved_tensors
        scale = grads[0].masked_fill(ignored, 0.0)
        out = probabilities * scale.unsqueeze(-1)
        hit = scale.masked_fill(foreign, 0.0).unsqueeze(-1)
        out.scatter_add_(-1, own, -hit)
        return out.to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Negative log-likelihood of every label; 0 where the label is ``ignore_index``.

    Arguments:
        logits: (..., V/t), this rank's columns, any floating dtype; statistics are fp32.
        labels: (...) int64, whole vocabulary ids, the same on every rank.
        axis: the tp axis.
        vocab_size: V; columns beyond it are padding and get no probability. Default: all columns.
        ignore_index: label of a position without a target.

    Returns fp32 (...), the same on every rank; NaN where a label is outside 0..V-1 (looking for
    one first would stop a GPU). Two all-reduces of one and three numbers a position; none in
    backward. Raises ValueError when shapes do not fit.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} need labels of shape {tuple(logits.shape[:-1])}, "
            f"got {tuple(labels.shape)}"
        )
    columns = logits.shape[-1] * axis.size
    size = columns if vocab_size is None else vocab_size
    if not 0 < size <= columns:
        raise ValueError(f"vocab_size {size} is not within 1..{columns}, the columns of all ranks")
    return _VocabParallelCrossEntropy.apply(logits, labels, axis, size, ignore_index)
