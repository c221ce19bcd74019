"""Between text and tokens: bytes, a tokenizer.json, or what transformers opens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kenotron_data import BYTES, END_OF_DOCUMENT, decode, encode, open_tokenizer, open_transformers
from kenotron_generate.prompts import Prompt

_BYTES = 256
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class PromptTokenizer:
    """Encoding and decoding of a model's tokens."""

    to_ids: Callable[[str], list[int]]
    to_text: Callable[[Sequence[int]], str]
    ends: frozenset[int]
    """Tokens that end a text."""
    begin: int | None = None
    """Token that begins a text out of nothing; None: the model has none."""
    chat: Callable[[list[dict[str, Any]]], list[int]] | None = None
    """Tokens of a chat whose next turn is the assistant's; None: there is no template."""

    def read(self, prompt: Prompt, *, template: bool) -> list[int]:
        """The tokens of a prompt; with ``template`` a text is one turn of a chat.

        An empty text is the token that begins one. Raises ValueError where there is none, and for
        messages where the tokenizer has no template.
        """
        if prompt == "":
            return self._nothing()
        if isinstance(prompt, str) and not (template and self.chat):
            return self.to_ids(prompt)
        if self.chat is None:
            raise ValueError(
                "messages were given, but the tokenizer has no chat template: give texts"
            )
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.chat(turns)

    def _nothing(self) -> list[int]:
        if self.begin is None:
            raise ValueError(
                "an empty prompt was given, but the model has no bos_token_id to begin a text "
                "with: give a text"
            )
        return [self.begin]


def open_words(
    name: str | None, eos: Sequence[int], begin: int | None = None, *, special: bool
) -> PromptTokenizer:
    """Open a tokenizer.

    Arguments: a folder or a name that transformers loads, a ``tokenizer.json``, or ``bytes``; None:
    bytes; tokens that end a text, whatever the tokenizer's own are; the one that begins a
    text out of nothing; whether a prompt gets the special tokens that the tokenizer puts around a
    text.

    Raises ValueError when there is no such tokenizer, ImportError when a library is missing.
    """
    if name is None or name == BYTES:
        ends = frozenset({END_OF_DOCUMENT, *(token for token in eos if token >= _BYTES)})
        begin = END_OF_DOCUMENT if begin is None or begin < _BYTES else begin
        return PromptTokenizer(lambda text: encode([text], _BYTES).tolist(), decode, ends, begin)
    if Path(name).suffix == ".json":
        return _tokenizer_file(Path(name), eos, begin, special=special)
    opened = open_transformers(name)

    def chat(messages: list[dict[str, Any]]) -> list[int]:
        found = opened.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(found["input_ids"])

    return PromptTokenizer(
        lambda text: list(opened(text, add_special_tokens=special)["input_ids"]),
        lambda ids: opened.decode(list(ids), skip_special_tokens=True),
        frozenset(eos),
        begin,
        chat if getattr(opened, "chat_template", None) else None,
    )


def _tokenizer_file(
    path: Path, eos: Sequence[int], begin: int | None, *, special: bool
) -> PromptTokenizer:
    opened: Any = open_tokenizer(str(path), end_of_document=None)
    inner = opened.backend
    return PromptTokenizer(
        lambda text: list(inner.encode(text, add_special_tokens=special).ids),
        lambda ids: inner.decode(list(ids), skip_special_tokens=True),
        frozenset(eos),
        begin,
    )


class Writer:
    """The text of tokens as they come, cut at the first of some strings.

    What could be the beginning of such a string, or of a character of several bytes, is held back
    until it is known.

    Arguments: tokens to text; tokens before the first new one, for they may decide about a space;
    strings that end the text.
    """

    def __init__(
        self, to_text: Callable[[Sequence[int]], str], before: Sequence[int], stops: Sequence[str]
    ) -> None:
        self._to_text, self._stops = to_text, stops
        self._ids = list(before[-8:])
        self._shown, self._read = 0, len(self._ids)
        self._held = ""
        self.text = ""
        """Text so far."""
        self.stopped = False
        """True where one of the strings came."""

    def add(self, token: int) -> str:
        """Add a token and return the text that it completes; empty after a stop."""
        self._ids.append(token)
        known = self._to_text(self._ids[self._shown : self._read])
        text = self._to_text(self._ids[self._shown :])
        if len(text) <= len(known) or text.endswith(_UNFINISHED):
            return ""
        self._shown, self._read = self._read, len(self._ids)
        return self._say(self._held + text[len(known) :], final=False)

    def rest(self) -> str:
        """Return the text that was held back, at the end of the text."""
        known = self._to_text(self._ids[self._shown : self._read])
        text = self._to_text(self._ids[self._shown :])
        self._shown = self._read = len(self._ids)
        return self._say(self._held + text[len(known) :], final=True)

    def _say(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            said = text[: min(places)]
        else:
            said = text if final else text[: len(text) - self._doubtful(text)]
            self._held = text[len(said) :]
        self.text += said
        return said

    def _doubtful(self, text: str) -> int:
        """Length of the longest end of a text that begins a stop."""
        lengths = [
            size
            for stop in self._stops
            for size in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:size])
        ]
        return max(lengths, default=0)
