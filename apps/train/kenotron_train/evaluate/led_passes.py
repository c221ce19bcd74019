"""Forward passes that all ranks make and rank 0 leads.

lm-eval runs on rank 0 alone: data sets are read and tokenised once, and its results cannot differ
between ranks. Rank 0 sends the tokens of each request; the other ranks follow until it ends.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kenotron_dist import broadcast_object
from kenotron_engine import ModelOnMesh, Row, Score, continue_texts, score_rows
from kenotron_models import Sampling
from kenotron_train.evaluate.text_tokens import TextTokens

MOST_TOKENS = 1 << 20
"""Tokens that are sent to the other ranks at once, unless one row has more."""


def is_failure(error: BaseException) -> bool:
    """Return whether an error is one of the code of tasks, which may raise anything.

    Ctrl-C of a program that does not handle it is none; a training handles it.
    """
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return not (isinstance(error, KeyboardInterrupt) and interrupts)


class LedPasses:
    """Scores and continuations of texts. Every rank has one.

    Args:
        model: the model; its ranks lead and follow.
        texts: the tokenizer, which decides where a continuation stops.
        window: most tokens that the model reads.
        batch_size: texts that a dp rank reads together.
        multiple_of: see ``score_rows``.
    """

    def __init__(
        self,
        model: ModelOnMesh,
        texts: TextTokens,
        *,
        window: int,
        batch_size: int,
        multiple_of: int = 1,
    ) -> None:
        self._model, self.texts = model, texts
        self.window, self._batch_size = window, batch_size
        self._multiple_of = multiple_of
        self._broken = False

    def lead(self, work: Callable[[], Any]) -> tuple[Any, str]:
        """Do work on rank 0 that may score and continue texts, while the other ranks follow.

        Returns:
            What the work returned, which must be JSON, and why it failed, on every rank. Only a
            failure of the passes themselves is raised.
        """
        mesh = self._model.mesh
        if mesh.rank:
            return self._follow()
        with mesh.pulse.busy("evaluating"):
            result, failure = None, ""
            try:
                result = work()
            except BaseException as error:
                if self._broken or not is_failure(error):
                    raise
                named = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                failure = f"{named}{error}"
            return self._tell("end", [result, failure])

    @property
    def broken(self) -> bool:
        """True where the passes themselves have failed, so that no further ones can be made."""
        return self._broken

    def score(self, rows: Sequence[Row]) -> list[Score]:
        """Score rows, the longest first. For rank 0, within ``lead``."""
        order = sorted(range(len(rows)), key=lambda row: -len(rows[row].tokens))
        found: dict[int, Score] = {}
        while order:
            count = max(1, MOST_TOKENS // len(rows[order[0]].tokens))
            numbers, order = order[:count], order[count:]
            sent = [[list(rows[n].tokens), rows[n].scored] for n in numbers]
            found |= zip(numbers, self._tell("score", sent), strict=True)
        return [found[number] for number in range(len(rows))]

    def continue_texts(
        self, prompts: Sequence[Sequence[int]], most: int, stops: Sequence[str], sampling: Sampling
    ) -> list[list[int]]:
        """Continue texts by at most so many tokens. For rank 0, within ``lead``.

        A text ends with the token that ends texts, and where its new text has one of ``stops``.
        """
        prompts = [list(prompt) for prompt in prompts]
        return self._tell("continue", [prompts, most, list(stops), asdict(sampling)])

    def _tell(self, command: str, arguments: Any) -> Any:
        with self._model.mesh.pulse.busy(""):  # passes are watched as those of a training
            sent = broadcast_object([command, arguments], self._model.mesh.world)
            return self._do(*sent)

    def _follow(self) -> tuple[Any, str]:
        while True:
            command, arguments = broadcast_object(None, self._model.mesh.world)
            if command == "end":
                return tuple(arguments)
            with contextlib.suppress(ValueError):  # all ranks have it: rank 0 ends the work
                self._do(command, arguments)

    def _do(self, command: str, arguments: Any) -> Any:
        """Make the passes of a command, on every rank."""
        if command == "end":
            return tuple(arguments)
        try:
            if command == "score":
                rows = [Row(*each) for each in arguments]
                return score_rows(
                    self._model, rows, self._batch_size, multiple_of=self._multiple_of
                )
            return self._continue(*arguments)
        except ValueError:
            raise
        except BaseException:
            self._broken = True
            raise

    def _continue(
        self, prompts: list[list[int]], most: int, stops: list[str], sampling: dict[str, Any]
    ) -> list[list[int]]:
        new: list[list[int]] = [[] for _ in prompts]
        longest = 4 * max(map(len, stops), default=0) + 4  # tokens that a stop may take, and more

        def ends(text: int, token: int) -> bool:
            new[text].append(token)
            if token in self.texts.ends:
                return True
            said = self.texts.to_text(new[text][-longest:]) if stops else ""
            return any(stop in said for stop in stops)

        return continue_texts(
            self._model,
            prompts,
            window=self.window,
            max_new_tokens=most,
            batch_size=self._batch_size,
            sampling=Sampling(**sampling),
            ends=ends,
        )
