"""Choosing tokens from logits cut over the vocabulary, without gathering them.

Shapes: B rows, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kenotron_dist import Axis, all_gather, all_reduce
from kenotron_dist.rng import counter_key, uniform
from kenotron_tp.select import sortable, survivors, unsorted


def choose_tokens(
    logits_BV: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    step: int = 0,
) -> Tensor:
    """One token for every row: the likeliest at temperature 0, else a sample of the softmax.

    Arguments:
        logits_BV: (B, V/t), this rank's columns, read as fp32.
        axis: the tp axis.
        vocab_size: V; columns beyond it are padding and are never chosen.
        temperature: divides the logits; 0 is greedy.
        top_k: sample among the k largest logits only, and those equal to the k-th.
        top_p: sample among the likeliest tokens only, as few as amount to this share of the
            softmax (of what top_k leaves, at this temperature), and those equal to the last.
            Like top_k it changes nothing at temperature 0.
        seed, step: the sample is a function of these, of the row and of the probabilities, and
            the same for every tp size.

    Returns int64 (B,), the same on every rank. The sample is the argmax of logits plus Gumbel
    noise, and each rank knows its own best: two numbers a row and rank are gathered, after an
    all-reduce of one number a row above temperature 0, and what ``survivors`` takes for top_k and
    top_p. Raises ValueError for an argument outside its range, a vocabulary that the columns do
    not hold, and (on every rank, before anything is chosen) a row that holds NaN or nothing but
    -inf; on a GPU that look waits for the logits. A logit of inf takes the whole probability.
    """
    _check_options(temperature, top_k, top_p)
    x_BV, width = logits_BV.detach().float(), logits_BV.shape[-1]
    if not 0 < vocab_size <= width * axis.size:
        raise ValueError(
            f"vocab_size {vocab_size} is not within 1..{width * axis.size}, the columns of all "
            "ranks"
        )
    ids_V = torch.arange(width, device=x_BV.device) + axis.rank * width
    real_BV = (ids_V < vocab_size).expand_as(x_BV)
    if temperature == 0:
        scores_BV = x_BV.double().masked_fill(~real_BV, -torch.inf)
    else:
        keys_BV = sortable(x_BV)
        odds_BV = _log_odds(x_BV, keys_BV, real_BV, temperature, axis)
        if top_k is not None and top_k >= vocab_size:
            top_k = None
        real_BV = survivors(
            keys_BV,
            odds_BV,
            real_BV & (x_BV > -torch.inf),
            axis,
            top_k=top_k,
            top_p=top_p,
            dtype=logits_BV.dtype,
        )
        noise_BV = _gumbel(ids_V, len(x_BV), seed, step)
        scores_BV = (odds_BV + noise_BV).masked_fill(~real_BV, -torch.inf)
    best, place = scores_BV.max(-1)
    found = all_gather(torch.stack([best, ids_V[place].double()])[None], axis)  # (t, 2, B)
    largest, winner = found[:, :1].max(0)  # of equal scores that of the lowest rank
    if temperature == 0:
        _check_rows(largest[0])
    return found[:, 1].gather(0, winner)[0].long()


def _log_odds(
    x_BV: Tensor, keys_BV: Tensor, real_BV: Tensor, temperature: float, axis: Axis
) -> Tensor:
    """Log of every probability over that of the row's likeliest: fp64 (B, V/t), 0 for the latter.

    The one number that both top-p and the sample go by. An all-reduce of one number a row; raises
    ValueError for a row without a softmax.
    """
    largest = unsorted(all_reduce(keys_BV.masked_fill(~real_BV, 0).amax(-1), axis, op="max"))
    _check_rows(largest)
    odds_BV = (x_BV.double() - largest.double()[:, None]) / temperature
    return odds_BV.nan_to_num_(nan=0.0)  # inf - inf, that is the largest itself


def _gumbel(ids_V: Tensor, rows: int, seed: int, step: int) -> Tensor:
    """Standard Gumbel noise, fp64 (rows, V/t), of the token and not of where its column lies."""
    base = counter_key(seed, "sample", step)
    rows_B = torch.arange(rows, device=ids_V.device)
    noise_BV = uniform(base, rows_B[:, None], ids_V[None, :], dtype=torch.float64)
    return -torch.log(-torch.log(noise_BV))


def _check_options(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not temperature >= 0:
        raise ValueError(
            f"temperature {temperature} is not 0 or more: 0 is greedy, 1 leaves the model"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k {top_k} is less than 1: give None to sample among all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} is not within (0, 1]: 1 samples among all tokens")


def _check_rows(largest_B: Tensor) -> None:
    """Refuse rows of which nothing is the largest; the same ones on every rank."""
    wrong = ~(largest_B > -torch.inf)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        what = "holds NaN" if largest_B[row].isnan() else "is -inf in every column"
        raise ValueError(
            f"row {row} of the logits {what}: no token can be chosen; look at what made them, "
            "the model or a mask"
        )
