"""Log-probabilities of the last tokens of rows, on any layout, without gathering logits.

Rows are shared by the ranks of dp and read in micro-batches of one length, the longest rows first.
Each rank of cp scores its part of a row; the vocabulary stays cut over tp.

Shapes: N rows, M micro-batches, B rows of a micro-batch, S tokens that the model reads of a row,
T = B * S, K tokens with a score among them, D hidden, V vocabulary; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kenotron_data import Batch, MicroBatch
from kenotron_dist import all_reduce
from kenotron_engine.model_on_mesh import ModelOnMesh
from kenotron_engine.objective import token_losses
from kenotron_engine.sample_order import check_whole_samples
from kenotron_engine.sequence import NO_TARGET
from kenotron_tp import (
    capped_logits,
    cross_entropy,
    join_tokens,
    likeliest,
    matmul,
    virtual_logits,
)

TOKENS_AT_A_TIME = 1024
"""Tokens whose logits (K, V/t) exist at once."""


class Row(NamedTuple):
    """Tokens of a text, of which the model reads all but the last."""

    tokens: Sequence[int]
    scored: int
    """Number of tokens at the end that are scored."""


class Score(NamedTuple):
    """Score that a model gives to the last tokens of a row."""

    logprob: float
    """Sum of their log-probabilities, in nats."""
    greedy: bool
    """True where each of them is the likeliest token of its place (of equals the lowest id)."""


def score_rows(
    model: ModelOnMesh, rows: Sequence[Row], batch_size: int, *, multiple_of: int = 1
) -> list[Score]:
    """Score the last tokens of each row.

    A reproducible model reads each row alone, padded to a multiple of ``multiple_of`` tokens: its
    losses are, to the bit, those of a training step with samples of this length.

    Args:
        model: the model; its layers drop nothing.
        rows: N rows of any lengths, the same on every rank.
        batch_size: B, rows that a dp rank reads together; a reproducible model reads one.
        multiple_of: see above; no padding exceeds the longest text of the model.

    Returns:
        N scores in the order of ``rows``, the same on every rank. Collective over the mesh.

    Raises:
        ValueError: a row has too few tokens for its score, or one outside the vocabulary; the
            model is in virtual chunks.
    """
    found = torch.zeros(len(rows), 2, dtype=torch.float64, device=model.mesh.device)
    adding_to = _adding_exactly if model.plan.reproducible else _adding_to
    read_rows(model, rows, batch_size, multiple_of, partial(adding_to, found))
    # Only ranks with the last layer have seen logits, and each dp rank its own rows alone.
    found = all_reduce(found, model.mesh["pp", "dp", "cp"])
    return [Score(-loss, misses == 0) for loss, misses in found.tolist()]


def read_rows(
    model: ModelOnMesh,
    rows: Sequence[Row],
    batch_size: int,
    multiple_of: int,
    taking: Callable[[ModelOnMesh, list[MicroBatch]], Callable[[Tensor, int], Tensor]],
) -> None:
    """Read all rows, and hand the input of the head to a loss.

    Arguments as of ``score_rows``; ``taking`` makes the loss of the micro-batches of a pass.
    Collective over the mesh. Raises ValueError as ``score_rows``.
    """
    _check(rows, model.plan.spec.vocab_size, batch_size)
    mesh, exact = model.mesh, model.plan.reproducible
    most = model.plan.spec.max_position_embeddings
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row].tokens))
    passes = _passes(order, mesh.sizes["dp"], mesh.sizes["pp"], batch_size)
    if exact:
        check_whole_samples(model.plan, "scores of rows")
        groups = groupby(order, lambda row: _width(rows[row], multiple_of, most))
        each = (list(group) for _, group in groups)
        passes = (p for g in each for p in _passes(g, mesh.sizes["dp"], mesh.sizes["pp"], 1))
    for numbers, shape in passes:
        width = _width(rows[numbers[0]], multiple_of if exact else 1, most)
        own = shape[0] * shape[1]
        first = mesh["dp"].rank * own
        batch = _batch(rows, numbers[first : first + own], (*shape, width))
        share = model.share_of(batch.to(mesh.device))
        loss = taking(model, share.micros)
        model.model.pipeline.evaluate(share.inputs, loss, share.contexts)


def _width(row: Row, multiple_of: int, most: int) -> int:
    """Return the tokens that a row is read with, padding included."""
    read = len(row.tokens) - 1
    return max(min(-(-read // multiple_of) * multiple_of, most), read)


def _passes(
    order: list[int], replicas: int, stages: int, batch_size: int
) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Numbers of the rows of each pass of the pipeline, and (M, B) of each dp rank.

    M and B are equal on all dp ranks: where replicas share experts or parameters, their passes
    communicate. A pipeline is filled by one micro-batch a stage.
    """
    while order:
        rows = min(batch_size, -(-len(order) // replicas))
        micros = min(stages, -(-len(order) // (replicas * rows)))
        count = replicas * micros * rows
        numbers, order = order[:count], order[count:]
        yield numbers, (micros, rows)


def _batch(rows: Sequence[Row], numbers: list[int], shape: tuple[int, int, int]) -> Batch:
    """This dp rank's micro-batches (M, B, S); rows that are missing are padding."""
    micros, height, width = shape
    tokens = torch.zeros(micros * height, width, dtype=torch.int64)
    labels, samples = torch.full_like(tokens, NO_TARGET), torch.full((micros * height,), -1)
    documents = torch.full_like(tokens, -1)  # -1: no expert sees it
    for place, number in enumerate(numbers):
        row = torch.tensor(rows[number].tokens)
        read = len(row) - 1
        tokens[place, :read], documents[place, :read] = row[:-1], 0
        labels[place, read - rows[number].scored : read] = row[-rows[number].scored :]
        samples[place] = number
    positions = torch.arange(width).expand(shape).contiguous()
    return Batch(
        tokens.view(shape), labels.view(shape), positions, samples.view(shape[:2]),
        documents_MBS=documents.view(shape),
    )  # fmt: skip


def logits_of(model: ModelOnMesh, x: Tensor) -> Tensor:
    """Return logits (K, V/t) of the head's input (K, D): a reproducible model's are its training's.

    ``x`` itself where the head is not ours, so that it is logits.
    """
    head, plan = model.model.head, model.plan
    if head is None:
        return x
    if plan.reproducible:
        return virtual_logits(x, head.weight, model.mesh["tp"], plan.virtual_shards, head.cap)
    return capped_logits(matmul(x, head.weight), head.cap)


def _adding_to(
    found: Tensor, model: ModelOnMesh, micros: list[MicroBatch]
) -> Callable[[Tensor, int], Tensor]:
    """A loss that adds losses, and tokens that are not the likeliest, to rows of ``found`` (N, 2).

    Its argument is the head's input (T, D), or the logits (T, V/t) of a head that is not ours.
    """

    def loss(x: Tensor, microbatch: int) -> Tensor:
        micro = micros[microbatch]
        labels = micro.labels_BS.flatten()
        places = (labels != NO_TARGET).nonzero()[:, 0]  # (K,), the same on every rank of tp
        head, tp = model.model.head, model.mesh["tp"]
        if head is not None and head.sequence_parallel:
            x = join_tokens(x, tp, len(labels))
        row_of = micro.samples_B.repeat_interleave(micro.labels_BS.shape[1])
        total = torch.zeros((), device=x.device)
        for part in places.split(TOKENS_AT_A_TIME) if len(places) else ():
            logits = logits_of(model, x[part])
            vocab_size = model.plan.spec.vocab_size
            each = cross_entropy(logits, labels[part], tp, vocab_size=vocab_size)[0]
            best, _ = likeliest(logits, tp, vocab_size=vocab_size)
            misses = best != labels[part]
            found.index_add_(0, row_of[part], torch.stack([each.double(), misses.double()], -1))
            total = total + each.sum()
        return total

    return loss


def _adding_exactly(
    found: Tensor, model: ModelOnMesh, micros: list[MicroBatch]
) -> Callable[[Tensor, int], Tensor]:
    """``_adding_to`` for micro-batches of one row, in the shapes of a training step."""

    def best_of(x: Tensor) -> Tensor:
        tp, vocab_size = model.mesh["tp"], model.plan.spec.vocab_size
        return likeliest(logits_of(model, x), tp, vocab_size=vocab_size)[0]

    def loss(x: Tensor, microbatch: int) -> Tensor:
        micro = micros[microbatch]
        labels = micro.labels_BS.flatten()
        each = token_losses(model, x, labels)
        best = torch.cat([best_of(part) for part in x.split(TOKENS_AT_A_TIME)])
        misses = (best != labels) & (labels != NO_TARGET)
        sums = torch.stack([each.double(), misses.double()], -1).sum(0, keepdim=True)
        found.index_add_(0, micro.samples_B.clamp_min(0), sums)  # of padding 0
        return each.sum()

    return loss


def _check(rows: Sequence[Row], vocab_size: int, batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size {batch_size}: give 1 or more rows")
    for number, (tokens, scored) in enumerate(rows):
        if not 0 < scored < len(tokens):
            raise ValueError(
                f"row {number} has {len(tokens)} tokens, of which {scored} are scored: at least "
                "one must be, and at least one must come before"
            )
        check_tokens(f"row {number}", tokens, vocab_size)


def check_tokens(of: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse tokens of a row or text that the model does not know, on every rank that asks."""
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"{of} has token {outside[0]}, outside the vocabulary 0..{vocab_size - 1}: "
            "is it of another tokenizer than the model?"
        )
