"""Choosing tokens from logits cut over the vocabulary, without gathering them.

Shapes: B rows, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kenotron_dist import Axis, all_gather
from kenotron_dist.rng import counter_key, uniform


def choose_tokens(
    logits_BV: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    temperature: float = 0.0,
    seed: int = 0,
    step: int = 0,
) -> Tensor:
    """One token for every row: the likeliest at temperature 0, else a sample of the softmax.

    Arguments:
        logits_BV: (B, V/t), this rank's columns.
        axis: the tp axis.
        vocab_size: V; columns beyond it are padding and are never chosen.
        temperature: divides the logits; 0 is greedy.
        seed, step: the sample is a function of these, of the row and of the probabilities, and
            the same for every tp size.

    Returns int64 (B,), the same on every rank. Gathers two numbers a row and rank: the sample is
    the argmax of logits plus Gumbel noise, and each rank knows its own best. Raises ValueError for
    a negative temperature, or a vocabulary that the columns do not hold.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature {temperature} is negative: 0 is greedy, 1 leaves the model")
    width = logits_BV.shape[-1]
    if not 0 < vocab_size <= width * axis.size:
        raise ValueError(
            f"vocab_size {vocab_size} is not within 1..{width * axis.size}, the columns of all "
            "ranks"
        )
    ids = torch.arange(width, device=logits_BV.device) + axis.rank * width
    scores = logits_BV.double()
    if temperature > 0:
        rows = torch.arange(len(scores), device=scores.device)
        base = counter_key(seed, "sample", step)
        noise = uniform(base, rows[:, None], ids[None, :], dtype=torch.float64)
        scores = scores / temperature - torch.log(-torch.log(noise))
    best, place = scores.masked_fill(ids >= vocab_size, -torch.inf).max(-1)
    found = all_gather(torch.stack([best, ids[place].double()])[None], axis)  # (t, 2, B)
    winner = found[:, 0].argmax(0, keepdim=True)  # the lowest rank where scores are equal
    return found[:, 1].gather(0, winner)[0].long()
