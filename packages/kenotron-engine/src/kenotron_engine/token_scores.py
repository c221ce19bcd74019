"""Log-probabilities of each of the last tokens of rows, and of the likeliest tokens there.

Shapes: N rows, B rows of a micro-batch, T tokens of a micro-batch on this rank, n likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kenotron_data import MicroBatch
from kenotron_dist import all_reduce
from kenotron_engine.model_on_mesh import ModelOnMesh
from kenotron_engine.objective import token_losses
from kenotron_engine.row_scores import TOKENS_AT_A_TIME, Row, logits_of, read_rows
from kenotron_engine.sequence import NO_TARGET
from kenotron_tp import join_tokens, likeliest_ids


class TokenScore(NamedTuple):
    """Score that a model gives to one token of a row."""

    logprob: float
    """Its log-probability, in nats."""
    likeliest: tuple[tuple[int, float], ...]
    """The likeliest tokens of its place and their log-probabilities, the likeliest first."""


def score_tokens(
    model: ModelOnMesh,
    rows: Sequence[Row],
    batch_size: int,
    *,
    multiple_of: int = 1,
    likeliest: int = 0,
) -> list[list[TokenScore]]:
    """Score each of the last tokens of each row.

    Those of a reproducible model are, to the bit, the losses of tokens of a training step.

    Args:
        model: see ``score_rows``, as the next ones.
        rows: N rows.
        batch_size: B.
        multiple_of: of tokens that a reproducible model reads.
        likeliest: n, the number of likeliest tokens of each place whose scores are added; each of
            them costs one more product with the head.

    Returns:
        For each row its scores, the same on every rank. Collective over the mesh.

    Raises:
        ValueError: as ``score_rows``, or n is not within 0 and the vocabulary.
    """
    if not 0 <= likeliest <= model.plan.spec.vocab_size:
        most = model.plan.spec.vocab_size
        raise ValueError(f"likeliest {likeliest}: give 0 to {most} tokens, the vocabulary")
    longest = max((len(row.tokens) for row in rows), default=0)
    shape = len(rows), longest, 1 + 2 * likeliest
    found = torch.zeros(shape, dtype=torch.float64, device=model.mesh.device)
    read_rows(model, rows, batch_size, multiple_of, partial(_putting_in, found))
    found = all_reduce(found, model.mesh["pp", "dp", "cp"])  # of a place one rank has its numbers
    scores = []
    for row, table in zip(rows, found.tolist(), strict=True):
        read = len(row.tokens) - 1
        scores.append([_token_score(line) for line in table[read - row.scored : read]])
    return scores


def _token_score(line: Sequence[float]) -> TokenScore:
    """Score of the numbers of a place: its loss, then token and loss of each likeliest one."""
    pairs = zip(line[1::2], line[2::2], strict=True)
    return TokenScore(-line[0], tuple((int(token), -loss) for token, loss in pairs))


def _putting_in(
    found: Tensor, model: ModelOnMesh, micros: list[MicroBatch]
) -> Callable[[Tensor, int], Tensor]:
    """A loss that puts the loss of each target into ``found`` (N, longest, 1 + 2n), at its place.

    Then token and loss of each of the n likeliest. Its argument is the head's input (T, D), or the
    logits of a head that is not ours.
    """
    count = (found.shape[-1] - 1) // 2

    def loss(x: Tensor, microbatch: int) -> Tensor:
        micro = micros[microbatch]
        labels = micro.labels_BS.flatten()
        targets = labels != NO_TARGET
        columns = [token_losses(model, x, labels)]
        ids = _likeliest_of(model, x, len(labels), count)
        for each in ids.unbind(-1):
            of_each = token_losses(model, x, each.masked_fill(~targets, NO_TARGET))
            columns += [each, of_each]
        rows = micro.samples_B.repeat_interleave(micro.labels_BS.shape[1])[targets]
        places = micro.positions_BS.flatten()[targets]
        found[rows, places] = torch.stack([each.double() for each in columns], -1)[targets]
        return columns[0].sum()

    return loss


def _likeliest_of(model: ModelOnMesh, x: Tensor, tokens: int, count: int) -> Tensor:
    """Return the likeliest tokens of each place, (T, n) int64; ``x`` as in ``_putting_in``."""
    head, tp, vocab_size = model.model.head, model.mesh["tp"], model.plan.spec.vocab_size
    if count == 0:
        return torch.zeros(tokens, 0, dtype=torch.int64, device=x.device)
    if head is not None and head.sequence_parallel:
        x = join_tokens(x, tp, tokens)
    parts = (logits_of(model, part) for part in x.split(TOKENS_AT_A_TIME))
    return torch.cat([likeliest_ids(p, tp, vocab_size=vocab_size, count=count) for p in parts])
