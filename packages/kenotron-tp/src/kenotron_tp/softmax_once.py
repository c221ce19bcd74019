"""Softmax of logits cut over the vocabulary that computes each exponential once.

``softmax`` computes them for the statistics and again for the gradient, in blocks that stay in a
CPU's cache. An accelerator is bound by the bytes that its kernels move. Here one fused kernel
writes the softmax over this rank's columns, and the gradient is that times a factor for each row.

Shapes: T rows (positions), V vocabulary, W = V'/t columns of a rank (V' is V padded).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kenotron_tp.softmax import SoftmaxStatistics, Terms, columns_of_rank, own_labels


class Shares(NamedTuple):
    """Results of a rank that need none of the other ranks' columns."""

    statistics: Tensor
    """(5, T), the rows of ``local_statistics``."""
    values: Tensor
    """(T, W) fp32 (fp64 for fp64 logits): softmax over this rank's columns, 0 in the padding."""


def computes_once(logits: Tensor, terms: Terms) -> bool:
    """Return whether logits (T, W) are worked on here; else by ``softmax``: label smoothing."""
    return logits.device.type != "cpu" and not terms.label_smoothing


def local_shares(logits: Tensor, labels: Tensor, terms: Terms) -> Shares:
    """Compute softmax and statistics of this rank's columns; padding of ``logits`` becomes -inf.

    Args:
        logits: (T, W), overwritten in its padding.
        labels: (T,) ids of the whole vocabulary.
        terms: those of the loss, without label smoothing.
    """
    first, real = columns_of_rank(terms, logits.shape[-1])
    own, foreign = own_labels(labels, first, real)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    found = logits.new_zeros((5, len(logits)), dtype=dtype)
    if real == 0:  # nothing but padding
        found[0] = -torch.inf
        return Shares(found, torch.zeros_like(logits, dtype=dtype))
    if real < logits.shape[-1]:
        logits[:, real:] = -torch.inf
    highest, place = logits.max(-1, keepdim=True)
    values = torch.softmax(logits, -1, dtype=dtype)
    found[0] = highest[:, 0]
    # The largest share is exp(0) / sum.
    torch.reciprocal(values.gather(-1, place)[:, 0], out=found[1])
    found[3] = logits.gather(-1, own)[:, 0].to(dtype).masked_fill(foreign, 0.0)
    found[4] = ~foreign
    return Shares(found, values)


def write_gradient_of_shares(
    out: Tensor, shares: Shares, labels: Tensor, of: SoftmaxStatistics, weight: Tensor, terms: Terms
) -> None:
    """Write the gradient of the losses times ``weight`` (T,) to ``out`` (T, W), rounded once.

    Args:
        out: any floating dtype; may be the logits.
        shares: from ``local_shares``.
        labels: (T,) ids of the whole vocabulary.
        of: the statistics over all ranks' columns.
        weight: (T,), what each loss is multiplied with.
        terms: those of the loss, without label smoothing.
    """
    own, foreign = own_labels(labels, *columns_of_rank(terms, out.shape[-1]))
    weight = weight.masked_fill(labels == terms.ignore_index, 0.0)
    # p_v is this rank's share of v, times the share that this rank has of the sum of all.
    rank_share = shares.statistics[1] * (shares.statistics[0] - of.highest).exp() / of.sum_exp
    factor = weight * rank_share
    if terms.z_loss:
        factor *= 1 + 2 * terms.z_loss * (of.highest + of.sum_exp.log())
    target = shares.values.gather(-1, own)[:, 0] * factor - weight.masked_fill(foreign, 0.0)
    torch.mul(shares.values, factor[:, None], out=out)
    out.scatter_(-1, own, target[:, None].to(out.dtype))
