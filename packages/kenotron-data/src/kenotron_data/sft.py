"""Supervised fine-tuning: samples of examples in which only the answers are learned.

S: sequence length. A sample holds one example, padded at its right end, or several that share it.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kenotron_data.best_fit import best_fit
from kenotron_data.chat import Chat, Example
from kenotron_data.config import SFTDatasetsConfig
from kenotron_data.hub import corpus_pieces
from kenotron_data.pack import check_index, check_indices
from kenotron_data.row_samples import PAD, Int64Array, Rows
from kenotron_data.text_pieces import TextPiece
from kenotron_data.tokenizer import Ids, TextTokenizer, without_end, wrap_tokenizer

_TOGETHER = 256
"""Rows that are encoded together."""


class ExampleEncoder(Protocol):
    """Turns rows into examples."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns whose values make a row."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Columns whose values follow; None where there are none."""
        ...

    def encode(self, rows: Sequence[tuple[Any, ...]]) -> list[list[Example]]:
        """Encode rows of values, each into its examples. ValueError where a row is wrong."""
        ...


class PromptCompletion:
    """Examples of a prompt and its completion: the completion and its end are learned.

    What only a chat can have (tools, a weight) is refused, not left out.

    Args:
        tokenizer: encodes both by themselves; the end of a document ends the completion.
        columns: the columns of the prompt and of the completion.
    """

    optional = ("tools", "chat_template_kwargs", "weight")

    def __init__(
        self, tokenizer: TextTokenizer, columns: tuple[str, str] = ("prompt", "completion")
    ) -> None:
        self.columns = columns
        self._completion, self._prompt = tokenizer, without_end(tokenizer)

    def encode(self, rows: Sequence[tuple[Any, ...]]) -> list[list[Example]]:
        """Encode rows of two texts, and of values of ``optional``, which must be empty."""
        for row in rows:
            for name, text in zip(self.columns, row[:2], strict=True):
                if not isinstance(text, str):
                    raise ValueError(f"{name} is {type(text).__name__}, not a string")
            for name, given in zip(self.optional, row[2:], strict=False):
                if given not in (None, "", [], {}, "[]", "{}") and (name, given) != ("weight", 1):
                    raise ValueError(
                        f"{name} is {given!r:.60}: a prompt and its completion have none; write "
                        "them as messages, or remove the column"
                    )
        prompts = self._prompt.encode([row[0] for row in rows])
        completions = self._completion.encode([row[1] for row in rows])
        return [
            [(np.concatenate(parts), np.repeat([False, True], [len(part) for part in parts]))]
            for parts in zip(prompts, completions, strict=True)
        ]


class SupervisedExamples:
    """Samples of S + 1 tokens in which labels are the learned tokens of examples alone.

    An example is a document of its sample: its positions start at 0, and it does not see the
    others where the model separates documents. Everything is kept in memory, 5 bytes a token.

    Args:
        pieces: where the rows come from, in order.
        encoder: makes examples of them.
        sequence_length: S. Examples of more than S + 1 tokens are left out, and counted.
        pack: put several examples in a sample, by best-fit; False gives each one of its own.
        pad_token: id of padding, which is never a label.
        most: rows that are read at most; None: all.
        longest: leave out examples of more tokens than this, too; None: S + 1 alone decides.

    Raises:
        ValueError: a row is wrong (it is named with the rule), S is not positive, or no example is
            left.
    """

    def __init__(
        self,
        pieces: Sequence[TextPiece],
        encoder: ExampleEncoder,
        sequence_length: int,
        *,
        pack: bool = True,
        pad_token: int = 0,
        most: int | None = None,
        longest: int | None = None,
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1, but {sequence_length} was given")
        self.sequence_length, self.pad_token = sequence_length, pad_token
        self.too_long = 0
        """Examples left out because they have too many tokens."""
        self.not_learned = 0
        """Examples left out because no token of them can be a label."""
        self.rows_read = 0
        """Rows that the examples come from, with those that are left out."""
        self._pieces = tuple(pieces)
        tokens: list[Ids] = [np.empty(0, dtype=np.uint32)]
        targets: list[NDArray[np.bool_]] = [np.empty(0, dtype=np.bool_)]
        places: list[tuple[int, int]] = []
        room = sequence_length + 1 if longest is None else min(sequence_length + 1, longest)
        for place, (ids, learned) in self._read(encoder, most):
            if len(ids) > room:
                self.too_long += 1
            elif not learned[1:].any():
                self.not_learned += 1
            else:
                tokens.append(ids.astype(np.uint32))
                targets.append(learned)
                places.append(place)
        if not places:
            raise ValueError(
                f"no example is left: {self.too_long} have more than {room} tokens, "
                f"{self.not_learned} have nothing to learn"
            )
        lengths = np.array([len(ids) for ids in tokens[1:]], dtype=np.int64)
        self._tokens, self._targets = np.concatenate(tokens), np.concatenate(targets)
        self._places = np.array(places, dtype=np.int64)
        self._ends: Int64Array = np.concatenate([[0], np.cumsum(lengths)])
        bins = best_fit(lengths, sequence_length + 1) if pack else np.arange(len(lengths))
        self._order = np.argsort(bins, kind="stable")  # examples, sample by sample
        self._first: Int64Array = np.concatenate([[0], np.cumsum(np.bincount(bins))])

    @property
    def examples(self) -> int:
        """Number of examples in all samples."""
        return len(self._places)

    @property
    def arrays(self) -> tuple[NDArray[np.integer], NDArray[np.bool_], Int64Array]:
        """Ids of all examples (N,), whether each is learned (N,), and where each example begins."""
        return self._tokens, self._targets, self._ends

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._first) - 1

    def sample(self, i: int) -> Int64Array:
        """Return the ids of sample `i`: (S+1,) int64; IndexError where there is none.

        `rows` marks those that are learned.
        """
        check_index(i, len(self))
        return self.rows(np.array([i], dtype=np.int64)).tokens[0].astype(np.int64)

    def rows(self, indices: Int64Array) -> Rows:
        """Read samples together; IndexError where there is none."""
        check_indices(indices, len(self))
        shape = (len(indices), self.sequence_length + 1)
        tokens = np.full(shape, self.pad_token, dtype=np.uint32)
        documents = np.full(shape, PAD, dtype=np.int32)
        targets = np.zeros(shape, dtype=np.bool_)
        for row, i in enumerate(indices.tolist()):
            column = 0
            for number, example in enumerate(self._examples(i)):
                start, stop = int(self._ends[example]), int(self._ends[example + 1])
                place = slice(column, column + stop - start)
                tokens[row, place] = self._tokens[start:stop]
                targets[row, place] = self._targets[start:stop]
                documents[row, place] = number
                column = place.stop
        return Rows(tokens, documents, targets)

    def describe(self, i: int) -> str:
        """Name the rows that sample `i` is made of."""
        places = (self._places[example].tolist() for example in self._examples(i))
        return "; ".join(self._pieces[piece].describe(place) for piece, place in places)

    def _read(
        self, encoder: ExampleEncoder, most: int | None
    ) -> Iterator[tuple[tuple[int, int], Example]]:
        for place, examples in _encoded(self._pieces, encoder, most):
            self.rows_read += 1
            yield from ((place, example) for example in examples)

    def _examples(self, i: int) -> list[int]:
        return self._order[self._first[i] : self._first[i + 1]].tolist()


def supervised(
    config: SFTDatasetsConfig,
    tokenizer: Any,
    sequence_length: int,
    *,
    pack: bool = True,
    validation: bool = False,
    longest: int | None = None,
) -> SupervisedExamples:
    """Read the examples of a configuration.

    Data sets with a column `messages` are chats, which need a tokenizer of `transformers` with a
    template; columns `tools`, `documents` and `chat_template_kwargs` reach it. Others have the
    columns `prompt` and `completion`.

    Args:
        config: which data sets, as in `cached_tokens`.
        tokenizer: a tokenizer of `transformers`; for prompts also a `TextTokenizer`.
        sequence_length: S.
        pack: see `SupervisedExamples`.
        validation: take the splits named after test or validation instead.
        longest: see `SupervisedExamples`.

    Raises:
        ValueError: see `SupervisedExamples`; or a data set has neither kind of columns.
    """
    pad = getattr(tokenizer, "pad_token_id", None)
    encoder = _encoder(config, tokenizer, validation)
    pieces = corpus_pieces(
        config, encoder.columns, optional=encoder.optional, validation=validation
    )
    return SupervisedExamples(
        list(itertools.chain.from_iterable(pieces)),
        encoder,
        sequence_length,
        pack=pack,
        pad_token=0 if pad is None else int(pad),
        most=config.debug_max_samples,
        longest=longest,
    )


def _encoder(config: SFTDatasetsConfig, tokenizer: Any, validation: bool) -> ExampleEncoder:
    """Choose by the columns of the first row."""
    said = []
    for columns in (("messages",), ("prompt", "completion")):
        source = corpus_pieces(config, columns, validation=validation)[0]
        try:
            next(itertools.chain.from_iterable(source), None)
        except ValueError as error:
            said.append(str(error))
            continue
        if columns == ("messages",):
            return Chat(tokenizer)
        is_text = not hasattr(tokenizer, "get_vocab")
        return PromptCompletion(tokenizer if is_text else wrap_tokenizer(tokenizer))
    raise ValueError(
        f"examples need the column messages, or prompt and completion: {'; '.join(said)}"
    )


def _encoded(
    pieces: Sequence[TextPiece], encoder: ExampleEncoder, most: int | None
) -> Iterator[tuple[tuple[int, int], list[Example]]]:
    """Yield the number of the piece, the place, and the examples; an error names the row."""
    rows: Iterable[tuple[int, int, tuple[Any, ...]]] = itertools.islice(
        ((n, place, values) for n, piece in enumerate(pieces) for place, values in piece), most
    )
    rows = iter(rows)
    while batch := list(itertools.islice(rows, _TOGETHER)):
        try:
            found = encoder.encode([values for *_, values in batch])
        except Exception:  # of any class: tokenizers and templates have their own
            for number, place, values in batch:
                try:
                    encoder.encode([values])
                except Exception as error:
                    raise ValueError(
                        f"{pieces[number].describe(place)}: this is no example ({error})"
                    ) from error
            raise
        for (number, place, _), examples in zip(batch, found, strict=True):
            yield (number, place), examples
