"""Cross entropy of logits cut over the vocabulary, without gathering them.

Shapes: ``...`` any leading dims (B, S or T), V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_dist import Axis
from kenotron_tp.autocast import outside_autocast
from kenotron_tp.softmax import (
    Statistics,
    Terms,
    checked_terms,
    local_statistics,
    losses,
    whole_statistics,
    write_gradient,
)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, terms: Terms, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        found = whole_statistics(local_statistics(logits, labels, terms), logits.shape[-1], terms)
        ctx.save_for_backward(logits, labels, *found)
        ctx.terms, ctx.in_place = terms, in_place
        loss, z = losses(found, labels, terms)
        ctx.mark_non_differentiable(z)
        return loss, z

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        logits, labels, *found = ctx.saved_tensors
        out = logits if ctx.in_place else torch.empty_like(logits)
        write_gradient(out, logits, labels, Statistics(*found), grads[0], ctx.terms)
        return out, None, None, None


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = ...,
    ignore_index: int = ...,
    z_loss: float = ...,
    label_smoothing: float = ...,
    in_place: bool = ...,
    return_z_loss: Literal[False] = ...,
) -> Tensor: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = ...,
    ignore_index: int = ...,
    z_loss: float = ...,
    label_smoothing: float = ...,
    in_place: bool = ...,
    return_z_loss: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    in_place: bool = False,
    return_z_loss: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Negative log-likelihood of every label; 0 where the label is ``ignore_index``.

    Arguments:
        logits: (..., V/t), this rank's columns, any floating dtype; statistics are fp32.
        labels: (...) int64, whole vocabulary ids, the same on every rank.
        axis: the tp axis.
        vocab_size: V; columns beyond it are padding and get no probability. Default: all columns.
        ignore_index: label of a position without a target.
        z_loss: adds this times the squared log-partition ``log sum exp(logits)``, which keeps it
            near 0 (Chowdhery et al., arXiv 2204.02311).
        label_smoothing: this share of the target is spread evenly over the vocabulary, as in
            ``F.cross_entropy`` (Szegedy et al., arXiv 1512.00567).
        in_place: backward writes the gradient over the logits. They are gone then; autograd
            raises if something else still needs them. They must be the result of an operation.
        return_z_loss: also return the z-loss in each loss (for the log; it has no gradient).

    Returns fp32 (...) (fp64 for fp64 logits), the same on every rank. One all-gather of five
    numbers a position; none in backward, which recomputes the probabilities: between the two only
    the logits are kept. Raises ValueError when shapes or coefficients do not fit; IndexError on
    CPU for a label outside 0..V-1, which elsewhere makes its loss NaN (looking would stop a GPU).
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} need labels of shape {tuple(logits.shape[:-1])}, "
            f"got {tuple(labels.shape)}"
        )
    base = logits if logits._base is None else logits._base
    if in_place and base.requires_grad and base.is_leaf:
        raise ValueError(
            "in_place would write the gradient over a leaf: give logits that an operation made, "
            "or in_place=False"
        )
    width = logits.shape[-1]
    terms = checked_terms(labels, width, axis, vocab_size, ignore_index, z_loss, label_smoothing)
    rows = logits.reshape(-1, width)
    loss, z = _VocabParallelCrossEntropy.apply(rows, labels.reshape(-1), terms, in_place)
    if return_z_loss:
        return loss.view(labels.shape), z.view(labels.shape)
    return loss.view(labels.shape)
