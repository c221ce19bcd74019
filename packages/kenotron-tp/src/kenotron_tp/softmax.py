"""Softmax statistics of logits cut over the vocabulary, and the gradient that follows from them.

What the cross entropies share: nothing here knows where the logits come from. Rows are worked on
in blocks, so that fp32 copies stay small whatever the dtype of the logits.

Shapes: T rows (positions), V vocabulary, W = V'/t columns of a rank (V' is V padded).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kenotron_dist import Axis, all_gather

_BLOCK = {"cpu": 2**20}  # elements of a block: a core's cache on CPU, few launches elsewhere
_BLOCK_ELSEWHERE = 2**27


class Terms(NamedTuple):
    """Terms added up for every position, and the columns that they are added over."""

    axis: Axis
    vocab_size: int
    ignore_index: int = -100
    z_loss: float = 0.0
    """Coefficient of the squared log-partition."""
    label_smoothing: float = 0.0
    """Share of the target's weight that is spread evenly over the vocabulary."""


class SoftmaxStatistics(NamedTuple):
    """Of every position (T,), the same on every rank; fp32, or fp64 for fp64 logits."""

    highest: Tensor
    """The largest logit."""
    sum_exp: Tensor
    """Sum of ``exp(logit - highest)``."""
    target: Tensor
    """Logit of the label; NaN where no rank has it."""
    total: Tensor
    """Sum of ``logit - highest``; without meaning where no label is smoothed."""


def checked_terms(
    labels: Tensor,
    width: int,
    axis: Axis,
    vocab_size: int | None,
    ignore_index: int,
    z_loss: float,
    label_smoothing: float,
) -> Terms:
    """The terms of a loss of ``width`` columns a rank; without ``vocab_size`` all of them count.

    ``labels`` are of any shape.

    Raises ValueError for sizes or coefficients that make no sense; on CPU also IndexError for a
    label outside the vocabulary. Elsewhere looking for one would stop the device, and the
    position's loss is NaN.
    """
    columns = width * axis.size
    size = columns if vocab_size is None else vocab_size
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels are {labels.dtype}: they are ids, int64 or int32")
    if not 0 < size <= columns:
        raise ValueError(
            f"vocab_size {size} is not within 1..{columns}, the columns of all ranks: "
            "give the vocabulary that the output layer was cut for"
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"label_smoothing {label_smoothing} is not within [0, 1): 0 smooths nothing"
        )
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss {z_loss} is not a finite coefficient, 0 or more: 0 adds nothing")
    if labels.device.type == "cpu" and labels.numel():
        outside = (labels < 0) | (labels >= size)
        outside &= labels != ignore_index
        if outside.any():
            place = tuple(outside.nonzero()[0].tolist())
            raise IndexError(
                f"label {labels[place].item()} at position {place} is outside the vocabulary "
                f"0..{size - 1}, and not ignore_index {ignore_index}"
            )
    return Terms(axis, size, ignore_index, z_loss, label_smoothing)


def local_statistics(logits: Tensor, labels: Tensor, terms: Terms) -> Tensor:
    """This rank's part of the statistics of logits (T, W): (5, T), the label's share in two rows.

    Rows: largest logit; sum of exponentials, and sum, of what the others are beyond it; logit of
    the label or 0; whether it is here.
    """
    first, real = columns_of_rank(terms, logits.shape[-1])
    own, foreign = own_labels(labels, first, real)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    found = logits.new_zeros((5, len(logits)), dtype=dtype)
    found[0] = -torch.inf
    if real == 0:  # nothing but padding
        return found
    found[3] = logits.gather(-1, own)[:, 0].to(dtype).masked_fill(foreign, 0.0)
    found[4] = ~foreign
    for rows in _blocks(logits):
        x = logits[rows, :real]
        highest = x.amax(-1, keepdim=True).to(dtype)
        found[0, rows] = highest[:, 0]
        shifted = x - highest.masked_fill(highest == -torch.inf, 0.0)  # in dtype
        if terms.label_smoothing:
            found[2, rows] = shifted.sum(-1)
        found[1, rows] = shifted.exp_().sum(-1)
    return found


def whole_statistics(local: Tensor, width: int, terms: Terms) -> SoftmaxStatistics:
    """The statistics over all ranks' columns: one all-gather of five numbers a position, (5, T)."""
    if terms.axis.size == 1:
        highest, sum_exp, total, target, here = local.unbind()
        return SoftmaxStatistics(highest, sum_exp, target.masked_fill(here == 0, torch.nan), total)
    return joined_statistics(all_gather(local[None], terms.axis), width, terms)


def joined_statistics(ranks: Tensor, width: int, terms: Terms) -> SoftmaxStatistics:
    """The statistics over the columns of n ranks, of each one's (n, 5, T) and ``width`` columns."""
    highest = ranks[:, 0].amax(0)
    lower = ranks[:, 0] - highest  # of each rank
    sum_exp = (ranks[:, 1] * lower.exp()).sum(0)
    starts = torch.arange(len(ranks), device=ranks.device)[:, None] * width
    real = (terms.vocab_size - starts).clamp(0, width)
    total = (ranks[:, 2] + (real * lower).masked_fill(real == 0, 0.0)).sum(0)
    target, here = ranks[:, 3:].sum(0).unbind()
    return SoftmaxStatistics(highest, sum_exp, target.masked_fill(here == 0, torch.nan), total)


def losses(of: SoftmaxStatistics, labels: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Loss of every position with all its terms, and the z-loss in it: (T,) each."""
    log_sum, smooth = of.sum_exp.log(), terms.label_smoothing
    distance = of.highest - of.target  # differences first: logits may be large
    if smooth:
        distance = (1 - smooth) * distance - smooth / terms.vocab_size * of.total
    ignored = labels == terms.ignore_index
    if not terms.z_loss:
        return (log_sum + distance).masked_fill(ignored, 0.0), torch.zeros_like(log_sum)
    z = terms.z_loss * (of.highest + log_sum).square()
    return (log_sum + distance + z).masked_fill(ignored, 0.0), z.masked_fill(ignored, 0.0)


def write_gradient(
    out: Tensor, logits: Tensor, labels: Tensor, of: SoftmaxStatistics, weight: Tensor, terms: Terms
) -> None:
    """Write to ``out`` (T, W) the gradient of the losses times ``weight`` (T,); may be ``logits``.

    ``dx_v = w (p_v (1 + 2 z log Z) - (1 - s) [v = label] - s / V)``, zero in the padding.
    """
    first, real = columns_of_rank(terms, logits.shape[-1])
    own, foreign = own_labels(labels, first, real)
    weight = weight.masked_fill(labels == terms.ignore_index, 0.0)
    scale = weight / of.sum_exp
    if terms.z_loss:
        partition = of.highest + of.sum_exp.log()
        scale = weight * (1 + 2 * terms.z_loss * partition) / of.sum_exp
    hit = (weight * (terms.label_smoothing - 1)).masked_fill(foreign, 0.0)
    direct = out.dtype == of.highest.dtype
    for rows in _blocks(logits):
        x = out[rows] if direct else torch.empty_like(logits[rows], dtype=of.highest.dtype)
        torch.sub(logits[rows], of.highest[rows, None], out=x)
        x.exp_().mul_(scale[rows, None])
        if terms.label_smoothing:
            x.sub_(weight[rows, None] * (terms.label_smoothing / terms.vocab_size))
        x.scatter_add_(-1, own[rows], hit[rows, None])
        x[:, real:] = 0
        if not direct:
            out[rows] = x


def columns_of_rank(terms: Terms, width: int) -> tuple[int, int]:
    """Return the first column of this rank, and how many of its columns are not padding."""
    first = terms.axis.rank * width
    return first, min(max(terms.vocab_size - first, 0), width)


def own_labels(labels: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Local column of every label (T, 1), 0 where another rank has it; and where (T,)."""
    own = labels - first
    foreign = (own < 0) | (own >= real)
    return own.masked_fill(foreign, 0)[:, None], foreign


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Ranges of rows of bounded size."""
    limit = _BLOCK.get(logits.device.type, _BLOCK_ELSEWHERE)
    step = max(limit // max(logits.shape[-1], 1), 1)
    return (slice(start, start + step) for start in range(0, len(logits), step))
