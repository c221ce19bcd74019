"""Choosing tokens from logits cut over the vocabulary, without gathering them.

Shapes: B rows, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kenotron_dist import Axis, all_gather, all_reduce
from kenotron_dist.rng import counter_key, uniform
from kenotron_tp.top_k_top_p import LARGEST_VOCABULARY, sortable, survivors, unsorted


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
    rows_B: Tensor | None = None,
) -> Tensor:
    """One token for every row: the likeliest at temperature 0, else a sample of the softmax.

    The sample is the argmax of logits plus Gumbel noise (Gumbel-max), and each rank knows its own
    best: two numbers a row and rank are gathered, after an all-reduce of one number a row above
    temperature 0 and those of ``survivors``, which also says how fine top_p is. A logit of inf
    takes the whole probability.

    Args:
        logits_BV: (B, V/t), this rank's columns, read as fp32.
        axis: the tp axis.
        vocab_size: V; columns beyond it are padding and are never chosen.
        temperature: divides the logits; 0 is greedy.
        top_k: sample among the k largest logits only, and those equal to the k-th.
        top_p: sample among the likeliest tokens only, as few as amount to this share of the
            softmax (of what top_k leaves, at this temperature), and those equal to the last.
            Like top_k it changes nothing at temperature 0.
        seed, step: the sample is a function of these, of the row's number and of the
            probabilities, and the same for every tp size.
        rows_B: (B,) int64, numbers of the rows; None: 0, 1, ...

    Returns:
        (B,) int64, the same on every rank.

    Raises:
        ValueError: an argument is outside its range, the columns do not hold the vocabulary, or a
            row holds NaN or nothing but -inf (on every rank; this look waits for a GPU's result).
    """
    _check_shape(logits_BV, axis, vocab_size)
    _check_options(temperature, top_k, top_p, vocab_size)
    logits_BV, width = logits_BV.detach(), logits_BV.shape[-1]
    first = axis.rank * width
    if temperature == 0:
        return _winners(logits_BV[:, : max(vocab_size - first, 0)], first, axis)
    x_BV = logits_BV.float()
    ids_V = torch.arange(width, device=x_BV.device) + first
    alive_BV = (x_BV != -torch.inf) & (ids_V < vocab_size)
    rows_B = torch.arange(len(x_BV), device=x_BV.device) if rows_B is None else rows_B
    odds_BV = _log_odds(x_BV, alive_BV, temperature, axis)
    alive_BV = survivors(
        logits_BV, odds_BV, alive_BV, axis, vocab_size=vocab_size, top_k=top_k, top_p=top_p
    )
    scores_BV = odds_BV + _gumbel(ids_V, rows_B, seed, step)
    return _winners(scores_BV.masked_fill(~alive_BV, -torch.inf), first, axis)


def likeliest(logits_BV: Tensor, axis: Axis, *, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The token of the highest logit of every row, the lowest of equals, and that logit.

    Gathers two numbers a row and rank.

    Args:
        logits_BV: (B, V/t), this rank's columns.
        axis: the tp axis.
        vocab_size: V, without the columns that pad it.

    Returns:
        (B,) int64 and (B,) fp64, the same on every rank: of a row that holds NaN its first NaN.

    Raises:
        ValueError: the columns do not hold the vocabulary.
    """
    _check_shape(logits_BV, axis, vocab_size)
    first = axis.rank * logits_BV.shape[-1]
    return _highest(logits_BV.detach()[:, : max(vocab_size - first, 0)], first, axis)


def likeliest_ids(logits_BV: Tensor, axis: Axis, *, vocab_size: int, count: int) -> Tensor:
    """Tokens of the highest logits of every row, the highest first, the lowest id of equals first.

    Gathers two numbers for each row, rank and token.

    Args:
        logits_BV: (B, V/t), this rank's columns.
        axis: the tp axis.
        vocab_size: V, without the columns that pad it.
        count: N, from 1 to V.

    Returns:
        (B, N) int64, the same on every rank.

    Raises:
        ValueError: the columns do not hold the vocabulary, or they are fewer than N.
    """
    _check_shape(logits_BV, axis, vocab_size)
    if not 1 <= count <= vocab_size:
        raise ValueError(f"count {count}: give 1 to {vocab_size} tokens, the vocabulary")
    first = axis.rank * logits_BV.shape[-1]
    own = logits_BV.detach()[:, : max(vocab_size - first, 0)].double()
    best, places = own.sort(dim=-1, descending=True, stable=True)
    best, places = best[:, :count], places[:, :count] + first
    found = own.new_full((2, len(own), count), -torch.inf)  # a rank may have fewer tokens
    found[0, :, : best.shape[1]], found[1, :, : best.shape[1]] = best, places
    scores, ids = all_gather(found[None], axis).unbind(1)  # (t, B, N)
    order = scores.transpose(0, 1).flatten(1).sort(dim=-1, descending=True, stable=True)[1]
    return ids.transpose(0, 1).flatten(1).gather(1, order[:, :count]).long()


def _log_odds(x_BV: Tensor, alive_BV: Tensor, temperature: float, axis: Axis) -> Tensor:
    """Log of every probability over that of the row's likeliest, at 0: fp64 (B, V/t).

    The one number that both top-p and the sample go by. An all-reduce of one number a row.
    """
    largest = x_BV.masked_fill(~alive_BV, -torch.inf).amax(-1, keepdim=True)
    largest = unsorted(all_reduce(sortable(largest), axis, op="max"))  # so that NaN wins on gloo
    odds_BV = (x_BV.double() - largest) / temperature
    return odds_BV.masked_fill_(x_BV == largest, 0.0)  # inf - inf too


def _highest(scores_BV: Tensor, first: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Ids (B,) int64 of the highest scores (B, at most V/t), the lowest of equals; and the scores.

    ``first``: id of this rank's first column.
    """
    if scores_BV.shape[-1] == 0:  # nothing but padding
        best = scores_BV.new_full((len(scores_BV),), -torch.inf)
        place = torch.zeros_like(best)
    else:
        best, place = scores_BV.max(-1)
    own = torch.stack([best.double(), place.double() + first])
    found = all_gather(own[None], axis)  # (t, 2, B)
    best, winner = found[:, 0].max(0)  # of the lowest rank where scores are equal
    return found[:, 1].gather(0, winner[None])[0].long(), best


def _winners(scores_BV: Tensor, first: int, axis: Axis) -> Tensor:
    """Ids of ``_highest``. Raises ValueError where a row holds NaN or only -inf."""
    chosen, best = _highest(scores_BV, first, axis)
    wrong = ~(best > -torch.inf)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        what = "holds NaN" if best[row].isnan() else "is -inf in every column"
        raise ValueError(
            f"row {row} of the logits {what}: no token can be chosen, look at what made them (the "
            "model, a mask)"
        )
    return chosen


def _gumbel(ids_V: Tensor, rows_B: Tensor, seed: int, step: int) -> Tensor:
    """Standard Gumbel noise, fp64 (B, V/t), of the token and not of where its column lies."""
    base = counter_key(seed, "sample", step)
    noise_BV = uniform(base, rows_B[:, None], ids_V[None, :], dtype=torch.float64)
    return -torch.log(-torch.log(noise_BV))


def _check_shape(logits: Tensor, axis: Axis, vocab_size: int) -> None:
    if logits.ndim != 2:
        raise ValueError(
            f"logits {tuple(logits.shape)} are not (rows, columns): give one row a text"
        )
    columns = logits.shape[-1] * axis.size
    if not 0 < vocab_size <= columns:
        raise ValueError(
            f"vocab_size {vocab_size} is not within 1..{columns}, the columns of all ranks"
        )


def _check_options(
    temperature: float, top_k: int | None, top_p: float | None, vocab_size: int
) -> None:
    check_sampling(temperature, top_k, top_p)
    if top_p is not None and vocab_size > LARGEST_VOCABULARY:
        raise ValueError(
            f"top_p adds up probabilities exactly for vocabularies up to {LARGEST_VOCABULARY}, "
            f"not {vocab_size}: use top_k"
        )


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raises ValueError for what ``choose_tokens`` refuses whatever the vocabulary is."""
    if not temperature >= 0:
        raise ValueError(
            f"temperature {temperature} is not 0 or more: 0 is greedy, 1 leaves the model"
        )
    if top_k is not None and (top_k < 1 or top_k != int(top_k)):
        raise ValueError(
            f"top_k {top_k} is not a whole number from 1: give None to sample among all tokens"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p {top_p} is not within (0, 1]: 1 samples among all tokens")
