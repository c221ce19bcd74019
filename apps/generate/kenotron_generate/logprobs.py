"""Log-probabilities of the tokens of texts, from one more forward pass over each whole text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kenotron_dist import Mesh
from kenotron_engine import Row, TokenScore, score_tokens
from kenotron_generate.load import Description, load_scorer

OF_TRAINING = "training"
"""Remark on log-probabilities that are, to the bit, those of a training forward."""
OF_EXPERTS = ", of the whole text: with experts, bits depend on what comes later in it"
"""Is added to it where products have as many rows as a text has tokens."""


@dataclass(frozen=True)
class TextScores:
    """Log-probabilities of a text's tokens."""

    tokens: list[TokenScore | None]
    """Of each token of prompt and continuation; None: the first, which nothing comes before."""

    def to_json(self, prompt: int, likeliest: int) -> dict[str, Any]:
        """Return the keys of a line of JSON.

        Args:
            prompt: tokens of the prompt.
            likeliest: number of the likeliest tokens at each place; 0: their keys are left out.
        """
        found: dict[str, Any] = {}
        for name, part in (("prompt_", self.tokens[:prompt]), ("", self.tokens[prompt:])):
            found[f"{name}logprobs"] = [each and each.logprob for each in part]
            if likeliest:
                found[f"{name}top_logprobs"] = [each and each.likeliest for each in part]
        return found


def check_lengths(
    texts: Sequence[Sequence[int]], described: Description, max_new_tokens: int, likeliest: int
) -> None:
    """Raise ValueError where texts may not be read whole, or have fewer likeliest tokens.

    Args:
        texts: tokens of the prompts.
        described: the model.
        max_new_tokens: most tokens that are added to each.
        likeliest: of each place.
    """
    if likeliest > described.model.vocab_size:
        raise ValueError(
            f"--logprobs {likeliest}: the vocabulary has {described.model.vocab_size} tokens: give "
            "at most as many"
        )
    window = described.sequence_length
    for number, text in enumerate(texts):
        if len(text) + max_new_tokens > window + 1:  # the last token is not read
            raise ValueError(
                f"--logprobs: prompt {number} has {len(text)} tokens, and with --max-new-tokens "
                f"{max_new_tokens} more than the {window + 1} of which the model can score each "
                "from all before: shorten one of them"
            )


def score_texts(
    mesh: Mesh,
    described: Description,
    texts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    likeliest: int,
    threads: int | None,
) -> tuple[list[TextScores], str | None]:
    """Score every token of texts. Collective over the mesh.

    The weights are read for it. A checkpoint with `general.reproducible` is computed as its
    training was: each text alone, padded to a multiple of the training's samples.

    Args:
        mesh: any layout that the model fits.
        described: the model.
        texts: tokens of each, the same on every rank.
        batch_size: texts that a replica reads together.
        likeliest: number of the likeliest tokens that are scored at each place.
        threads: those of each rank; None: those of a reproducible training.

    Returns:
        Scores of each text, and a remark on their bits: ``OF_TRAINING``, or why they are others;
        None where the training had no reproducible bits.

    Raises:
        ValueError: the mesh does not fit the model, or a file is damaged.
    """
    model, remark = load_scorer(described, mesh, threads=threads)
    long = [number for number, text in enumerate(texts) if len(text) > 1]
    rows = [Row(texts[number], len(texts[number]) - 1) for number in long]
    found = score_tokens(
        model, rows, batch_size, multiple_of=described.sequence_length, likeliest=likeliest
    )
    scores = [TextScores([None] * len(text)) for text in texts]
    for number, each in zip(long, found, strict=True):
        scores[number] = TextScores([None, *each])
    if described.reproducible is None:
        return scores, None
    if remark:
        return scores, remark.removeprefix("general.reproducible: ")
    return scores, OF_TRAINING + (OF_EXPERTS if described.model.routes else "")
