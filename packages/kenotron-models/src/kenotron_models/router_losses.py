"""Losses of a router: even load of the experts, and small logits.

All are sums over tokens that are divided by the tokens of the global batch. The z-loss and the
balance of samples do not depend on how the batch is cut. Other balance losses depend on the size of
a micro-batch, as their definitions do, and on nothing else of the layout.

Shapes: B rows of a micro-batch, G groups of tokens that are balanced, n tokens of this rank,
E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from kenotron_dist import Axis
from kenotron_dist.autograd import reduce_from
from kenotron_dist.weight_products import current_backward
from kenotron_models.context import Context
from kenotron_models.router import Choice, RouterSpec
from kenotron_tp import from_shards

Add = Callable[[Sequence[Tensor]], Tensor]
"""Adds up a tensor of each chunk of this rank's tokens, over ranks, too."""


class LoadSums(NamedTuple):
    """Sums over ranks of the tokens that each group sent to the experts of a layer."""

    counts_GE: Tensor
    """Choices of each expert, without gradient."""
    mass_GE: Tensor
    """Sums of scores; the scores of a token add up to 1."""
    tokens_G: Tensor
    """Tokens."""


def over_ranks(axes: Sequence[Axis] = ()) -> Add:
    """Return what adds up one tensor, of any shape, of each rank of some axes. Collective."""

    def add(parts: Sequence[Tensor]) -> Tensor:
        [total] = parts
        for axis in axes:
            total = reduce_from(total, axis)
        return total

    return add


def layer_loss(
    choices: Sequence[Choice],
    rows: Tensor | None,
    context: Context,
    spec: RouterSpec,
    layer: int,
    tp: Axis,
) -> Tensor | None:
    """Return the losses of a layer in a step, a scalar; None: it has none.

    Args:
        choices: what was decided for this rank's tokens, of each of its virtual chunks.
        rows: of all of them, as ``routed_rows`` returns.
        context: the micro-batch, which keeps what later layers need.
        spec: weights of the losses.
        layer: its number.
        tp: the ranks that the tokens of a rank of cp are cut over.
    """
    if context.loss_weight is None or not (spec.balance_loss or spec.z_loss):
        return None
    batch, sequence = context.positions_BS.shape
    if rows is None:
        n = sum(len(choice.experts_TK) for choice in choices)
        rows = torch.arange(n, device=context.loss_weight.device) // sequence
    cut = context.cut
    add = over_ranks([tp, *([] if cut is None else [cut.axis])])
    if context.chunks and cut is not None:
        add = partial(from_shards, axis=cut.axis)
    known: dict[int, LoadSums] = context.kept.setdefault("load sums", {})
    earlier = [sums for each, sums in known.items() if each < layer]
    loss, sums = router_loss(choices, spec, rows.chunk(len(choices)), batch, add, earlier)
    if sums is not None and spec.balances_all_layers and current_backward() == -1:
        known[layer] = sums
    return loss * context.loss_weight


def router_loss(
    choices: Sequence[Choice],
    spec: RouterSpec,
    rows: Sequence[Tensor],
    batch: int,
    add: Add,
    earlier: Iterable[LoadSums] = (),
) -> tuple[Tensor, LoadSums | None]:
    """Return the losses of this rank's tokens of a micro-batch, and what was counted for them.

    The losses are a scalar, fp32, not yet divided. Its value counts what ``add`` adds up; its
    gradient is that of this rank's tokens. Collective as ``add`` is.

    Args:
        choices: what was decided for n tokens of each chunk.
        spec: weights of the losses.
        rows: which row each token of a chunk belongs to, int64 (n,); ``batch`` for padding.
        batch: B.
        add: sum over chunks, and over the ranks that the tokens of a row are cut over.
        earlier: sums of the layers before this one, for ``all_layers``.
    """
    total, sums = choices[0].logits_TE.new_zeros(()), None
    if spec.balance_loss:
        sums = load_sums(choices, spec, rows, batch, add)
        total = total + spec.balance_loss * balance(sums, spec, earlier)
    if spec.z_loss:
        squares = [each.logits_TE.logsumexp(-1).square() for each in choices]
        pairs = zip(squares, rows, strict=True)
        own = add([each.masked_fill(of == batch, 0.0).sum() for each, of in pairs])
        total = total + spec.z_loss * own
    return total, sums


def load_sums(
    choices: Sequence[Choice], spec: RouterSpec, rows: Sequence[Tensor], batch: int, add: Add
) -> LoadSums:
    """Count choices and scores of each sample, or of the micro-batch as one group.

    Arguments as in ``router_loss``.
    """
    pairs = zip(choices, rows, strict=True)
    found = zip(*(_sums_of_chunk(each, spec, of, batch) for each, of in pairs), strict=True)
    counts, mass = (add(each) for each in found)
    return LoadSums(counts[:, :-1], mass, counts[:, -1])


def _sums_of_chunk(
    choice: Choice, spec: RouterSpec, rows: Tensor, batch: int
) -> tuple[Tensor, Tensor]:
    """Choices of each expert and tokens (G, E + 1), and sums of scores (G, E)."""
    if spec.balance != "sample":
        rows, batch = (rows == batch).long(), 1
    scores = choice.scores_TE
    if spec.scoring == "sigmoid":
        scores = scores / scores.sum(-1, keepdim=True)
    member = one_hot(rows, batch + 1)[:, :batch].to(scores.dtype)  # (n, G)
    chosen = torch.zeros_like(scores).scatter_(1, choice.experts_TK, 1.0)  # (n, E)
    counts = torch.cat([member.t() @ chosen, member.sum(0)[:, None]], 1)  # (G, E + 1)
    return counts, member.t() @ scores  # (G, E)


def balance(sums: LoadSums, spec: RouterSpec, earlier: Iterable[LoadSums] = ()) -> Tensor:
    """Return the balance loss of a layer times the tokens that it is computed over, a scalar.

    Of N tokens, f_i is the share of them that chose expert i, and P_i the mean of its scores; the
    scores of a token add up to 1. Where all experts are chosen equally often, f_i is K / E.

    * ``sample``: ``E / K * sum_i f_i P_i`` of each sample of N tokens; 1 at an even load. It is the
      sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, eq. 17 to 20) and Megatron-LM's
      ``seq_aux_loss``. It does not depend on the size of a micro-batch.
    * ``micro_batch``: the same over all tokens of a micro-batch; it is Megatron-LM's ``aux_loss``.
    * ``all_layers``: ``E * sum_i f_i P_i`` over all tokens of a micro-batch in all L layers with
      experts, as one list of L N tokens; K at an even load. It is ``load_balancing_loss_func`` of
      Hugging Face's transformers, and there is one such loss for the model instead of L. Each
      layer returns what its tokens add to the loss of the layers before it.

    The result is multiplied by N, because a caller divides by the tokens of the global batch: with
    micro-batches of equal size their mean is what counts.

    Args:
        sums: those of this layer.
        spec: E, K, L and the kind.
        earlier: sums of the layers before this one, for ``all_layers``.
    """
    counts, mass, tokens = sums
    tokens = tokens.clamp(min=1)
    if spec.balance != "all_layers":
        each = (counts / tokens[:, None] * mass).sum(-1)  # N sum_i f_i P_i
        return each.sum() * (spec.experts / spec.top_k)
    product = (counts * mass).sum()
    for before in earlier:  # terms of pairs of layers, of which this one is the later
        product = product + (counts * before.mass_GE + before.counts_GE * mass).sum()
    return product / tokens.sum() * (spec.experts / spec.layers**2)
