"""Attention sinks: a score of each head without a value, which takes its share of every softmax.

What attention over all keys returned is changed once, after the merge over ranks. Output and
log-sum-exp with the sink are what the backward of any kernel needs: probabilities are
exp(score - lse), and the sink's value is 0.

B rows, H query heads, n tokens of this rank, V features of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of attention that has sinks.

    Args:
        out: attention without them, (B, H, n, V).
        lse: its log-sum-exp, (B, H, n); -inf where nothing is seen.
        sinks: (H,), or (B, H, n).
    """
    # As in ``merge``: each operation rounds by itself, whatever the element's place in the tensor.
    scores = _of_queries(sinks, lse)
    top = torch.maximum(lse, scores)
    seen = (lse - top).exp()
    total = seen + (scores - top).exp()
    return (out * (seen / total)[..., None]).to(out.dtype), top + total.log()


def gradient_of_sinks(out: Tensor, lse: Tensor, grad: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, in their shape, of the queries of this rank.

    Args:
        out: attention with sinks, (B, H, n, V).
        lse: its log-sum-exp, (B, H, n).
        grad: gradient of ``out``.
        sinks: (H,), or (B, H, n).
    """
    share = (_of_queries(sinks, lse) - lse).exp()
    mean = (grad.to(lse.dtype) * out).sum(-1)  # of the gradients of the shares of keys
    found = share * mean
    return -(found.sum((0, 2)) if sinks.ndim == 1 else found).to(sinks.dtype)


def _of_queries(sinks: Tensor, lse: Tensor) -> Tensor:
    """Return sinks in the dtype of lse (B, H, n), and in a shape that goes with its."""
    wide = sinks.to(lse.dtype)
    return wide[:, None] if sinks.ndim == 1 else wide
