"""Cross entropy over a vocabulary that is cut over ranks, of logits or of the head's input.

One all-gather of five numbers a position in forward. Of logits, backward recomputes the
probabilities: between the two only the logits are kept. With the weight of the head, logits exist
for a few tokens at a time, and there is an all-reduce of every chunk's gradient; under sequence
parallelism an all-gather in forward and a reduce-scatter in backward instead. For a loss of each
token backward computes the logits once more, a third of the head's time; for a sum they are
computed once: gradients are made in forward, and backward, of which there is one, multiplies them.

Shapes: ``...`` any leading dims (B, S or T), T tokens, n tokens of a rank, I input features, V
vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kenotron_dist import Axis
from kenotron_dist.autograd import all_gather_from
from kenotron_tp.autocast import cast_for_autocast, outside_autocast
from kenotron_tp.fused_cross_entropy import Chunked, summed_losses, token_losses
from kenotron_tp.logit_cap import capped_logits, check_cap
from kenotron_tp.sequence import check_tokens, rows_of_rank
from kenotron_tp.softmax import (
    SoftmaxStatistics,
    Terms,
    checked_terms,
    local_statistics,
    losses,
    whole_statistics,
    write_gradient,
)
from kenotron_tp.virtual_cross_entropy import virtual_losses


class _LogitLosses(torch.autograd.Function):
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
        write_gradient(out, logits, labels, SoftmaxStatistics(*found), grads[0], ctx.terms)
        return out, None, None, None


def cross_entropy(
    x: Tensor,
    labels: Tensor,
    axis: Axis,
    *,
    weight: Tensor | None = None,
    reduction: Literal["none", "sum"] = "none",
    times: Tensor | float | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    cap: float | None = None,
    chunk: int | None = None,
    sequence_parallel: bool = False,
    in_place: bool = False,
    shards: int = 1,
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of the labels, and the z-loss in it, which has no gradient.

    Args:
        x: logits (..., V/t), this rank's columns, any floating dtype; or, with ``weight``, the
            input of the head: (..., I), whole on every rank; (n, ..., I) if ``sequence_parallel``.
        labels: (...) int64, whole vocabulary ids of all tokens, the same on every rank.
        axis: the tp axis.
        weight: (V/t, I), this rank's rows of the output layer: logits are ``x W^T``.
        reduction: ``none``: a loss of each label; ``sum``: scalars. There is no mean: a micro-batch
            or a rank knows only its own share of what a mean divides by.
        times: what sums are multiplied with, one over the labels of the global batch say; a scalar
            tensor is never read on the host. Gradients are made with it, which float16 needs.
        vocab_size: V; columns beyond it are padding and get no probability. Default: all columns.
        ignore_index: label of a position without a target; its loss is 0.
        z_loss: adds this times the squared log-partition ``log sum exp(logits)``, which keeps it
            near 0 (Chowdhery et al., arXiv 2204.02311).
        label_smoothing: this share of the target is spread evenly over the vocabulary, as in
            ``F.cross_entropy`` (Szegedy et al., arXiv 1512.00567).
        cap: logits l are cap * tanh(l / cap), computed in fp32; None: they stay.
        chunk: tokens whose logits exist at a time. Default: 1024; of a sum, ``tokens_at_a_time``.
        sequence_parallel: x is this rank's tokens (see ``sequence``); they are gathered here.
        in_place: backward writes the gradient over the logits, which nothing else may need.
        shards: with ``weight``: virtual shards of the vocabulary (see ``virtual_cross_entropy``).

    Returns loss and z-loss, fp32 (fp64 of fp64 logits), the same on every rank: (...), or scalars.
    Raises ValueError for options that do not fit; IndexError on CPU for a label outside 0..V-1,
    which elsewhere makes its loss NaN (looking would stop a GPU).
    """
    _check_options(weight, reduction, times, chunk, sequence_parallel, in_place)
    check_cap(cap)
    x = _all_tokens(x, labels, axis) if sequence_parallel else x
    _check_shapes(x, weight, labels)
    width = x.shape[-1] if weight is None else weight.shape[0]
    terms = checked_terms(labels, width, axis, vocab_size, ignore_index, z_loss, label_smoothing)
    flat, scale = labels.reshape(-1), _scalar(times, x) if reduction == "sum" else None
    if weight is None:
        found = _of_logits(capped_logits(x, cap).reshape(-1, width), flat, terms, scale, in_place)
    else:
        how = Chunked(terms, chunk or 0, not sequence_parallel, cap)
        found = _of_head(x, weight, flat, how, scale, shards)
    shape = labels.shape if scale is None else ()
    return found[0].view(shape), found[1].view(shape)


def _of_logits(
    logits: Tensor, labels: Tensor, terms: Terms, times: Tensor | None, in_place: bool
) -> tuple[Tensor, Tensor]:
    if in_place:
        _check_overwritten(logits)
    loss, z = _LogitLosses.apply(logits, labels, terms, in_place)
    return (loss, z) if times is None else (loss.sum() * times, z.sum() * times)


def _of_head(
    x: Tensor, weight: Tensor, labels: Tensor, how: Chunked, times: Tensor | None, shards: int
) -> tuple[Tensor, Tensor]:
    x, weight, _ = cast_for_autocast(x, weight, None)
    rows = x.reshape(-1, x.shape[-1])
    if shards > 1:
        loss, z = virtual_losses(rows, weight, labels, how, shards)
        return (loss, z) if times is None else (loss.sum() * times, z.sum() * times)
    # Logits exist for some tokens at a time. Single losses do not know their gradients yet: their
    # backward computes logits again. A sum has one gradient, so its forward makes those of x
    # and weight.
    if times is None:
        return token_losses(rows, weight, labels, how)
    return summed_losses(rows, weight, labels, how, times)


def _scalar(times: Tensor | float | None, x: Tensor) -> Tensor:
    """Return ``times`` on the device of x, fp32 at least."""
    scale = times if isinstance(times, Tensor) else torch.full((), 1.0 if times is None else times)
    return scale.to(x.device, torch.promote_types(x.dtype, torch.float32))


def _all_tokens(x: Tensor, labels: Tensor, axis: Axis) -> Tensor:
    check_tokens(x)
    if rows_of_rank(len(labels), axis) != len(x):
        raise ValueError(
            f"{len(labels)} labels do not fit x {tuple(x.shape)} of {axis.size} ranks: labels are "
            "those of all tokens, x those of this rank"
        )
    return all_gather_from(x, axis)[: len(labels)]


def _check_options(
    weight: Tensor | None,
    reduction: str,
    times: Tensor | float | None,
    chunk: int | None,
    sequence_parallel: bool,
    in_place: bool,
) -> None:
    if reduction not in ("none", "sum"):
        raise ValueError(
            f'reduction {reduction!r} is neither "none" nor "sum": for a mean give "sum" and '
            "times=1 / the labels of the global batch"
        )
    if times is not None and reduction == "none":
        raise ValueError('times is of a sum: give reduction="sum", or multiply the losses')
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk {chunk} is not positive: it is a number of tokens")
    if weight is None and (chunk or sequence_parallel):
        given = "chunk" if chunk else "sequence_parallel"
        raise ValueError(f"{given} is of the head's input: give weight too; without it x is logits")
    if weight is not None and in_place:
        raise ValueError("in_place is of logits: with weight they exist for a few tokens at a time")


def _check_shapes(x: Tensor, weight: Tensor | None, labels: Tensor) -> None:
    if weight is None:
        if x.shape[:-1] != labels.shape:
            raise ValueError(
                f"logits {tuple(x.shape)} need labels of shape {tuple(x.shape[:-1])}, got "
                f"{tuple(labels.shape)}; for the input of a head give its weight"
            )
    elif x.shape[:-1] != labels.shape or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit labels "
            f"{tuple(labels.shape)}: x is (..., I), weight (V/t, I), labels (...), all tokens "
            "unless sequence_parallel=True"
        )


def _check_overwritten(logits: Tensor) -> None:
    base = logits if logits._base is None else logits._base
    if base.requires_grad and base.is_leaf:
        raise ValueError(
            "in_place would write the gradient over a leaf: give logits that an operation made, "
            "or in_place=False"
        )
