"""Losses of a router: even load of the experts, and small logits.

Both are sums over tokens and samples that are divided by the tokens of the global batch: they do
not depend on how the batch is cut into micro-batches and over ranks.

Shapes: B rows of a micro-batch, n tokens of this rank, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from kenotron_dist import Axis
from kenotron_dist.autograd import reduce_from
from kenotron_models.router import Choice, RouterSpec


def router_loss(
    choice: Choice, spec: RouterSpec, rows: Tensor, batch: int, axes: Sequence[Axis]
) -> Tensor:
    """Return the losses of this rank's tokens of a micro-batch: a scalar, fp32, not yet divided.

    Its value counts what all ranks of ``axes`` have; its gradient is that of this rank's tokens.
    Collective over them.

    Args:
        choice: what was decided for n tokens.
        spec: weights of the losses.
        rows: which row each token belongs to, int64 (n,); ``batch`` for padding.
        batch: B.
        axes: those over which the tokens of a row are cut.
    """
    total = choice.logits_TE.new_zeros(())
    if spec.balance_loss:
        total = total + spec.balance_loss * balance(choice, spec, rows, batch, axes)
    if spec.z_loss:
        squares = choice.logits_TE.logsumexp(-1).square()
        own = squares.masked_fill(rows == batch, 0.0).sum()
        for axis in axes:
            own = reduce_from(own, axis)
        total = total + spec.z_loss * own
    return total


def balance(
    choice: Choice, spec: RouterSpec, rows: Tensor, batch: int, axes: Sequence[Axis]
) -> Tensor:
    """Return the balance loss of a micro-batch's samples, each as often as it has tokens.

    Of one sample of N tokens it is ``E / K * sum_i f_i P_i``: f_i is the share of its N K choices
    that fell on expert i times K, P_i the mean score, scores of a token adding up to 1. It is 1
    where all experts are chosen equally often (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20).

    Arguments as in ``router_loss``.
    """
    scores = choice.scores_TE
    if spec.scoring == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    member = one_hot(rows, batch + 1)[:, :batch].to(scores.dtype)  # (n, B)
    chosen = torch.zeros_like(scores).scatter_(1, choice.experts_TK, 1.0)  # (n, E)
    counts = torch.cat([member.t() @ chosen, member.sum(0)[:, None]], 1)  # (B, E + 1)
    mass = member.t() @ scores  # (B, E)
    for axis in axes:
        counts, mass = reduce_from(counts, axis), reduce_from(mass, axis)
    tokens = counts[:, -1:].clamp(min=1)
    each = (counts[:, :-1] / tokens * mass).sum(-1)  # N sum_i f_i P_i
    return each.sum() * (spec.experts / spec.top_k)
