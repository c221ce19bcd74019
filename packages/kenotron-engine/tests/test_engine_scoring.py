"""Scores and continuations of texts: those of plain torch on one process, on every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import ADAMW, EXPERTS, LLAMA, plan, training_of

from kenotron_cp import AttentionWay
from kenotron_data import Batch
from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    CPMode,
    ModelOnMesh,
    Row,
    Score,
    TokenScore,
    Training,
    build_model,
    continue_texts,
    gradients_of,
    score_rows,
    score_tokens,
)
from kenotron_models import Context, Sampling
from kenotron_tp import TPMode

LENGTHS = (12, 2, 7, 9, 3, 8, 13, 5, 4)  # no number of dp ranks divides them


def rows_of(seed: int = 3) -> list[Row]:
    """Rows with any number of scored tokens; in one all of them are the likeliest."""
    draw = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, LLAMA.vocab_size, (n,), generator=draw).tolist() for n in LENGTHS]
    return [Row(each, 1 + place % (len(each) - 1)) for place, each in enumerate(tokens)]


def logits_of(training: Training, tokens: list[int]) -> torch.Tensor:
    """All logits (S, V) of a row on one process."""
    context = Context(torch.arange(len(tokens))[None])
    return training.model.pipeline.forward([torch.tensor(tokens)], [context])[0]


def greedy(training: Training, prompt: list[int], count: int) -> list[int]:
    """New tokens by reading the whole text again and again."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(logits_of(training, text)[-1, : LLAMA.vocab_size].argmax()))
    return text[len(prompt) :]


def by_hand(mesh: Mesh, spec) -> tuple[list[Row], list[Score], list[list[int]]]:
    """Scores of each row alone, the first with the model's own answer; and greedy tokens."""
    training = training_of(mesh, plan(spec=spec))
    rows = rows_of()
    tokens = [*rows[0].tokens[:4], *greedy(training, list(rows[0].tokens[:4]), 5)]
    rows[0] = Row(tokens, 5)
    scores = []
    for row in rows:
        each = logits_of(training, list(row.tokens[:-1]))[-row.scored :, : LLAMA.vocab_size]
        targets = torch.tensor(row.tokens[-row.scored :])
        found = each.double().log_softmax(-1).gather(1, targets[:, None]).sum()
        scores.append(Score(float(found), bool((each.argmax(-1) == targets).all())))
    return rows, scores, [greedy(training, list(row.tokens[:4])[:3], 6) for row in rows]


def in_sum(tokens: list[TokenScore]) -> Score:
    """A row's score from those of its tokens."""
    greedy = all(token.likeliest[0][1] == token.logprob for token in tokens)
    return Score(sum(token.logprob for token in tokens), greedy)


def on_layout(mesh: Mesh, spec, mode: TPMode, way: AttentionWay, zero_stage: int, rows: list[Row]):
    """Scores with two batch sizes, and greedy tokens that stop in every second text."""
    of = plan(spec=spec, mode=mode, cp_mode=CPMode(way))
    training = training_of(mesh, of, zero_stage=zero_stage)
    scores = [score_rows(training, rows, batch_size) for batch_size in (2, 5)]
    scores.append([in_sum(each) for each in score_tokens(training, rows, 3, likeliest=1)])
    count = [0] * len(rows)

    def ends(text: int, token: int) -> bool:
        count[text] += 1
        return text % 2 == 1 and count[text] == 4

    prompts = [list(row.tokens[:4])[:3] for row in rows]
    new = continue_texts(
        training, prompts, window=12, max_new_tokens=6, batch_size=2, sampling=Sampling(), ends=ends
    )
    return scores, new


SEQUENCE = TPMode(sequence_parallel=True)


@pytest.mark.parametrize(
    ("spec", "axes", "mode", "zero_stage"),
    [
        (LLAMA, {}, TPMode(), 1),
        (LLAMA, {"tp": 2, "pp": 2}, SEQUENCE, 1),
        (LLAMA, {"dp": 2, "cp": 2}, TPMode(), 1),
        (LLAMA, {"dp": 2, "tp": 2}, TPMode(), 3),
        (EXPERTS, {"dp": 2, "ep": 2}, TPMode(), 1),
    ],
    ids=["one", "tp2 pp2", "dp2 cp2", "dp2 tp2 zero3", "ep2"],
)
def test_every_layout_has_the_scores_and_texts_of_plain_torch(spec, axes, mode, zero_stage) -> None:
    rows, scores, texts = on_ranks(by_hand, spec.decoder)[0]
    assert scores[0].greedy
    assert not scores[1].greedy
    found = on_ranks(on_layout, spec.decoder, mode, "ring", zero_stage, rows, **axes)
    for both, new in found:
        for each in both:
            assert [score.greedy for score in each] == [score.greedy for score in scores]
            assert [score.logprob for score in each] == pytest.approx(
                [score.logprob for score in scores], abs=1e-4
            )
        assert new == [text[: 4 if place % 2 else 6] for place, text in enumerate(texts)]


def without_optimizer(mesh: Mesh) -> list[Score]:
    of = plan()
    return score_rows(ModelOnMesh(plan=of, mesh=mesh, model=build_model(of, mesh)), rows_of(), 4)


def scores_of_training(mesh: Mesh) -> list[Score]:
    return score_rows(training_of(mesh), rows_of(), 4)


def test_a_model_without_an_optimizer_scores_as_its_training() -> None:
    (found,) = on_ranks(without_optimizer)
    assert found == on_ranks(scores_of_training)[0]


def refused(mesh: Mesh) -> None:
    model = training_of(mesh)
    for row, words in (
        (Row([1, 2], 2), "row 0 has 2 tokens, of which 2 are scored: at least one must be"),
        (Row([1, 2], 0), "row 0 has 2 tokens, of which 0 are scored"),
        (Row([1, 61], 1), r"row 0 has token 61, outside the vocabulary 0\.\.60: is it of another"),
    ):
        with pytest.raises(ValueError, match=words):
            score_rows(model, [row], 1)
    with pytest.raises(ValueError, match="batch_size 0: give 1 or more rows"):
        score_rows(model, [Row([1, 2], 1)], 0)
    assert score_rows(model, [], 1) == []


def test_rows_that_cannot_be_scored_are_errors() -> None:
    on_ranks(refused)


def refused_texts(mesh: Mesh) -> None:
    model = training_of(mesh)
    for text, words in (
        ([5, 61], r"text 2 has token 61, outside the vocabulary 0\.\.60: is it of another"),
        ([], "text 2 has no tokens: give at least one"),
    ):
        with pytest.raises(ValueError, match=words):
            continue_texts(
                model, [[1, 2], [3, 4], text], window=12, max_new_tokens=1, batch_size=2,
                sampling=Sampling(), ends=lambda text, token: False,
            )  # fmt: skip


def test_texts_that_cannot_be_continued_are_errors_on_all_ranks() -> None:
    on_ranks(refused_texts, dp=2)


def exactly(mesh: Mesh, spec, shards: int, rows: list[Row], batch_size: int) -> list[Score]:
    return score_rows(exact_model(mesh, spec, shards), rows, batch_size, multiple_of=5)


def exact_model(mesh: Mesh, spec, shards: int) -> ModelOnMesh:
    of = plan(spec=spec, reproducible=True, virtual_shards=shards)
    return ModelOnMesh(plan=of, mesh=mesh, model=build_model(of, mesh))


def both(mesh: Mesh, *how: Any):
    return exactly(mesh, *how), of_tokens(mesh, *how)


def of_tokens(mesh: Mesh, spec, shards: int, rows: list[Row], batch_size: int):
    model = exact_model(mesh, spec, shards)
    return score_tokens(model, rows, batch_size, multiple_of=5, likeliest=3)


def losses_of_steps(mesh: Mesh, spec, shards: int, rows: list[Row]) -> list[float]:
    """The loss of a step on each row alone, padded to 5, 10 or 12 tokens; its target is its last.

    Other tokens than 0 pad it: without experts they count for nothing.
    """
    of, found = plan(spec=spec, reproducible=True, virtual_shards=shards), []
    rule = replace(ADAMW.optimizer_factory, torch_adam_is_fused=False)
    training = training_of(mesh, of, optimizer_factory=rule)
    for row in rows:
        read = len(row.tokens) - 1
        shape = 1, 1, min(-(-read // 5) * 5, LLAMA.max_position_embeddings)
        tokens, labels = torch.full(shape, 9), torch.full(shape, -100)
        tokens[0, 0, :read] = torch.tensor(row.tokens[:-1])
        labels[0, 0, read - 1] = row.tokens[-1]
        places = torch.arange(shape[-1]).expand(shape).contiguous()
        documents = torch.where(places < read, 0, -1) if spec.routes else None
        sample = torch.zeros(1, 1, dtype=torch.int64)
        batch = Batch(tokens, labels, places, sample, documents_MBS=documents)
        found.append(gradients_of(training, batch)[0])
    return found


@pytest.mark.parametrize(("spec", "shards"), [(LLAMA, 4), (LLAMA, 1), (EXPERTS, 1)])
def test_reproducible_scores_are_the_losses_of_training_steps(spec, shards) -> None:
    mesh, rows = Mesh.connect(), [Row(row.tokens, 1) for row in rows_of()]
    want = losses_of_steps(mesh, spec.decoder, shards, rows)
    assert [-score.logprob for score in exactly(mesh, spec.decoder, shards, rows, 3)] == want
    tokens = of_tokens(mesh, spec.decoder, shards, rows, 3)
    assert [-score.logprob for [score] in tokens] == want
    # The likeliest tokens have the scores that they have in the row's place.
    others = [Row([*rows[1].tokens[:-1], token], 1) for token, _ in tokens[1][0].likeliest]
    scores = exactly(mesh, spec.decoder, shards, others, 2)
    assert [each.logprob for each in scores] == [own for _, own in tokens[1][0].likeliest]
    assert [each.greedy for each in scores] == [True, False, False]


@pytest.mark.parametrize(
    ("spec", "shards", "layouts"),
    [
        (LLAMA, 4, [{"dp": 3}, {"tp": 2, "pp": 2}, {"tp": 4}]),
        (EXPERTS, 1, [{"dp": 2, "ep": 2}]),
    ],
)
def test_reproducible_scores_are_the_same_on_every_layout(spec, shards, layouts) -> None:
    mesh, rows = Mesh.connect(), rows_of()
    want = exactly(mesh, spec.decoder, shards, rows, 1)
    each = of_tokens(mesh, spec.decoder, shards, rows, 1)
    for axes in layouts:
        for found in on_ranks(both, spec.decoder, shards, rows, 4, **axes):
            assert found == (want, each)
    # What comes later in a text counts for nothing: one token after the other is one row at once.
    row = rows[0]
    split = [Row(row.tokens[: n + 1], 1) for n in range(6, 10)]
    parts = exactly(mesh, spec.decoder, shards, split, 2)
    if not spec.decoder.routes:
        [whole] = exactly(mesh, spec.decoder, shards, [Row(row.tokens[:10], 4)], 1)
        assert whole.logprob == sum(part.logprob for part in parts)


def test_one_token_is_the_likeliest_in_a_row_with_padding() -> None:
    prompt = rows_of()[0].tokens[:4]
    rows = [Row([*prompt, token], 1) for token in range(LLAMA.vocab_size)]
    scores = exactly(Mesh.connect(), LLAMA.decoder, 4, rows, 1)
    best = max(scores, key=lambda score: score.logprob)
    assert [score for score in scores if score.greedy] == [best]


def in_chunks(mesh: Mesh) -> None:
    of = plan(reproducible=True, virtual_chunks=2)
    with pytest.raises(ValueError, match="virtual_chunks = 2: scores of rows are not computed in"):
        score_rows(ModelOnMesh(plan=of, mesh=mesh, model=build_model(of, mesh)), rows_of(), 1)


def test_rows_in_chunks_are_not_scored() -> None:
    on_ranks(in_chunks)
