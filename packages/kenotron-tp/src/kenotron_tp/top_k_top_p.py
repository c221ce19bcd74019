"""Tokens that may be drawn: top-k and top-p over logits cut over the vocabulary, ungathered.

Both ask the same thing of a row: the largest logit at which what stands at or above it first
amounts to enough. A radix select answers exactly. Logits become integers of the same order, and
each round all ranks add up what stands under each value of the next 8 bits; the sums are of
integers, so no cut of the vocabulary changes them.

Shapes: B rows, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kenotron_dist import Axis, all_reduce

_DIGIT = 8  # bits a round
_KEY = 32  # bits of a key
_WEIGHT = 40  # bits after the point of a probability, the likeliest token's being 1
LARGEST_VOCABULARY = 1 << 22  # so that the weights of a row sum to less than 2^63
_ROUNDS = {torch.bfloat16: 2, torch.float16: 3}  # the further bits of their keys say nothing


def sortable(x: Tensor) -> Tensor:
    """Integers ordered as the numbers of ``x`` (fp32, any shape): int64 within 0..2^32 - 1.

    Equal numbers get equal keys, -0 and 0 too; NaN stands above everything, whatever its sign.
    """
    bits = (x + 0.0).masked_fill(x.isnan(), torch.nan).view(torch.int32)
    return _mirror(bits).long() + (1 << (_KEY - 1))


def unsorted(keys: Tensor) -> Tensor:
    """The fp32 numbers that have these ``sortable`` keys (int64, any shape)."""
    return _mirror((keys - (1 << (_KEY - 1))).int()).view(torch.float32)


def _mirror(bits: Tensor) -> Tensor:
    """Turn the order of negative floats round; done twice it changes nothing."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def survivors(
    logits_BV: Tensor,
    odds_BV: Tensor,
    alive_BV: Tensor,
    axis: Axis,
    *,
    vocab_size: int,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """The columns of ``alive_BV`` that top-k, and then top-p among its survivors, leave.

    4 all-reduces (bf16: 2, fp16: 3) of 256 int64 a row for each of top-k and top-p. Weights of
    top-p are rounded to 2^-40 of the largest, but never to 0: a p within V * 2^-40 of 1 keeps the
    whole tail rather than losing what it amounts to. Columns that equal the last one kept are kept
    too. Sources: Fan et al., arXiv 1805.04833 (top-k); Holtzman et al., arXiv 1904.09751 (top-p).

    Args:
        logits_BV: (B, V/t), compared as fp32.
        odds_BV: (B, V/t) fp64, log of each probability over the row's largest: at most 0.
        alive_BV: (B, V/t) bool, the columns to choose from.
        axis: the tp axis.
        vocab_size: V, up to ``LARGEST_VOCABULARY``.
        top_k, top_p: None, k from V on, or p of 1 leave the columns as they are.

    Returns:
        (B, V/t) bool.
    """
    k = vocab_size if top_k is None else min(top_k, vocab_size)
    p = 1.0 if top_p is None else top_p
    if k == vocab_size and p == 1:
        return alive_BV
    rounds = _ROUNDS.get(logits_BV.dtype, _KEY // _DIGIT)
    keys_BV = sortable(logits_BV.float())
    if k < vocab_size:
        least = threshold(keys_BV, alive_BV.long(), lambda total: total.clamp(max=k), axis, rounds)
        alive_BV = alive_BV & (keys_BV >= least[:, None])
    if p < 1:
        weights = _weights(odds_BV).masked_fill_(~alive_BV, 0)
        least = threshold(keys_BV, weights, lambda total: _share(p, total), axis, rounds)
        alive_BV = alive_BV & (keys_BV >= least[:, None])
    return alive_BV


def _weights(odds_BV: Tensor) -> Tensor:
    """Probabilities in units of 2^-40 of the largest, at least 1: int64 (B, V/t).

    exp, unlike exp2 on CPU, gives an element the same bits wherever it stands in a tensor.
    """
    return odds_BV.exp().mul_(1 << _WEIGHT).round_().long().clamp_(min=1)


def _share(p: float, total: Tensor) -> Tensor:
    """The least whole number that is p of ``total`` (int64 (B,)), exact to 53 bits."""
    return torch.minimum((total.double() * p).ceil().long(), total)


def threshold(
    keys_BV: Tensor,
    amounts_BV: Tensor,
    need: Callable[[Tensor], Tensor],
    axis: Axis,
    rounds: int = _KEY // _DIGIT,
) -> Tensor:
    """The largest key of each row at or above which the amounts sum to what is needed.

    One all-reduce of 256 int64 a row and round. A radix select (Alabi et al., ACM JEA 17, 2012).

    Args:
        keys_BV: (B, V/t) int64 within 0..2^32 - 1.
        amounts_BV: (B, V/t) int64, 0 or more; a row of all ranks sums to less than 2^63.
        need: from the sums of all rows, (B,) int64, to what is needed of each, within 1..sum.
        axis: the tp axis.
        rounds: how many times 8 leading bits to tell apart; keys that differ later count as equal.

    Returns:
        (B,) int64, the same on every rank; the bits after the last round are 0.
    """
    rows = torch.arange(len(keys_BV), device=keys_BV.device)[:, None] << _DIGIT
    prefix = lacking = rows.new_zeros(len(rows))
    for done in range(rounds):
        shift = _KEY - _DIGIT * (done + 1)
        leading = keys_BV >> shift
        inside = amounts_BV.masked_fill(leading >> _DIGIT != prefix[:, None], 0)
        places = (leading & ((1 << _DIGIT) - 1)) + rows
        heaps = rows.new_zeros(len(rows) << _DIGIT)
        heaps.scatter_add_(0, places.flatten(), inside.flatten())
        heaps = all_reduce(heaps.view(len(rows), 1 << _DIGIT), axis)
        above = heaps.flip(-1).cumsum(-1).flip(-1)  # each heap and those of larger digits
        if done == 0:
            lacking = need(above[:, 0])
        digit = (above >= lacking[:, None]).sum(-1, keepdim=True) - 1
        lacking = lacking - (above - heaps).gather(-1, digit)[:, 0]
        prefix = (prefix << _DIGIT) + digit[:, 0]
    return prefix << (_KEY - _DIGIT * rounds)
