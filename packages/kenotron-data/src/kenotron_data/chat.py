"""Chats as a tokenizer's template writes them, and which of their tokens are answers.

N: tokens of an example. An answer is a stretch of the text that the template writes. The text is
encoded once, as a whole, and the offsets of its tokens tell which of them belong to an answer.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kenotron_data.chat_messages import (
    Message,
    as_templates_see,
    chat_messages,
    is_learned,
    said_beside_content,
    tool_list,
)

ROW_OPTIONS = ("tools", "documents", "chat_template_kwargs")
"""Columns of a row that its template also sees."""
_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_BEGIN, _END = "\U000f5b01", "\U000f5b02"
"""Characters for private use that stand where a marked answer begins and ends."""
_OWN = ("tokenize", "add_generation_prompt", "continue_final_message", "return_dict", *ROW_OPTIONS)
_PROMPT = (
    "the chat template begins an answer otherwise than its generation prompt says, so the answers "
    "cannot be found: mark them in the template with {% generation %}"
)

_OTHER = "x"
"""Text that makes another one of a content."""

Ids = NDArray[np.integer]
Example = tuple[Ids, NDArray[np.bool_]]
"""(N,) ids of an example, and (N,) where an id is learned."""
Span = tuple[int, int]
"""First character of an answer, and the one after its last."""
Write = Callable[..., str]


class Chat:
    """Examples of messages: what the assistant says is learned, with what the template ends it by.

    The end of sequence is appended if the last answer does not have it. Answers are what
    `{% generation %}` marks in the template; in one without marks, what a turn of the assistant
    adds to the text. A token is learned if it holds any character of an answer.

    A template that writes earlier turns otherwise once another follows (without their thoughts)
    makes several examples of one conversation: each answer is learned once, after the text that the
    model reads when it gives this answer.

    Args:
        tokenizer: a tokenizer of `transformers` with a chat template.
        column: the column of the messages: dicts with `role` and `content`, and where needed
            `tool_calls` and `weight` (0: this answer is not learned).

    Raises:
        ValueError: the tokenizer has no template, or is a slow one, which has no text offsets.
    """

    optional = ROW_OPTIONS

    def __init__(self, tokenizer: Any, column: str = "messages") -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"chats need a tokenizer of transformers with a chat template, but "
                f"{getattr(tokenizer, 'name_or_path', tokenizer)!r} has none: give one that has, "
                "or columns prompt and completion"
            )
        if not tokenizer.is_fast:
            raise ValueError(
                f"chats need a fast tokenizer, but {tokenizer.name_or_path!r} is written in Python"
            )
        self.columns = (column,)
        self._tokenizer = tokenizer
        self._written: set[tuple[str, str]] = set()

    def encode(self, rows: Sequence[tuple[Any, ...]]) -> list[list[Example]]:
        """Encode conversations. ValueError where one is wrong, or the template's own error."""
        return [self._examples(*values) for values in rows]

    def _examples(self, given: Any, *options: Any) -> list[Example]:
        messages = chat_messages(given)
        write, template = self._writer(messages, options)
        self._check_written(messages, write)
        if _MARK.search(template):
            text, spans = _by_marks(messages, write, template)
            return [self._example(text, spans, is_learned(messages[-1]))]
        return [
            self._example(text, spans, bool(spans) and spans[-1][1] == len(text))
            for text, spans in _by_turns(messages, write)
        ]

    def _writer(self, messages: list[Message], options: Sequence[Any]) -> tuple[Write, str]:
        """Return what writes messages with the options of a row, and the template it takes."""
        names = dict(zip(ROW_OPTIONS, options, strict=False))
        more = _template_options(names.pop("chat_template_kwargs", None))
        own = {"tools": tool_list(names.get("tools")), "documents": names.get("documents") or None}
        own = {key: value for key, value in own.items() if value}
        template = self._tokenizer.get_chat_template(tools=own.get("tools"))

        def write(messages: Sequence[Message], **changed: Any) -> str:
            seen = [as_templates_see(message) for message in messages]
            asked: dict[str, Any] = {"chat_template": template} | own | more | changed
            return self._tokenizer.apply_chat_template(seen, tokenize=False, **asked)

        for key in own:
            if not _differs(write, messages, messages, **{key: None}):
                raise ValueError(
                    f"the row has {key}, but the chat template does not write them: give a "
                    "tokenizer whose template does, or leave the column out"
                )
        return write, template

    def _check_written(self, messages: list[Message], write: Write) -> None:
        """Refuse what the template would leave out; each kind is looked at until it is written."""
        for number, message in enumerate(messages):
            role, keys = message["role"], said_beside_content(message)
            kinds = [(key, key, None) for key in keys]
            if content := message["content"]:
                kinds.append((" next to ".join(("content", *keys)), "content", content + _OTHER))
            for what, key, other in kinds:
                if (role, what) in self._written:
                    continue
                before, changed = messages[:number], message | {key: other}
                if other is None:
                    del changed[key]
                if not _differs(write, [*before, message], [*before, changed]):
                    raise ValueError(
                        f"message {number}: the chat template does not write {what} of the role "
                        f"{role!r}: give a tokenizer whose template does, or leave them out"
                    )
                self._written.add((role, what))

    def _example(self, text: str, spans: Sequence[Span], ends: bool) -> Example:
        """Encode a text, and mark the tokens that share a character with an answer.

        Where the text `ends` with an answer, the end of sequence follows if it is not there yet.
        """
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"], dtype=np.int64)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        learned = np.zeros(len(ids), dtype=np.bool_)
        first = len(ids)
        for start, stop in spans:
            inside = _inside(offsets, start, stop)
            learned |= inside
            first = int(inside.argmax()) if inside.any() else first
        end = self._tokenizer.eos_token_id
        if ends and end is not None and learned.any() and end not in ids[first:]:
            ids, learned = np.append(ids, end), np.append(learned, True)
        return ids, learned


def _inside(offsets: NDArray[np.int64], start: int, stop: int) -> NDArray[np.bool_]:
    """Return which tokens share a character with [start, stop), or stand in it without any."""
    begins, ends = offsets[:, 0], offsets[:, 1]
    return (begins < stop) & ((ends > start) | (begins >= start))


def _by_turns(messages: list[Message], write: Write) -> list[tuple[str, list[Span]]]:
    """Find the texts that hold each answer as it was given, and the stretches they add."""
    found: list[tuple[str, list[Span]]] = [(write(messages), [])]
    for number in reversed(range(len(messages))):
        if messages[number]["role"] != "assistant":
            continue
        if number == 0:
            raise ValueError("the first message is of the assistant: there is nothing to answer")
        if not is_learned(messages[number]):
            continue
        before = write(messages[:number], add_generation_prompt=True)
        after = write(messages[: number + 1])
        if not after.startswith(before):
            raise ValueError(_PROMPT)
        if not any(text.startswith(after) for text, _ in found):
            found.append((after, []))
        spans = next(spans for text, spans in found if text.startswith(after))
        spans.insert(0, (len(before), len(after)))
    return [each for each in reversed(found) if each[1]] or found


def _by_marks(messages: list[Message], write: Write, template: str) -> tuple[str, list[Span]]:
    """Find what the template marks; `weight: 0` leaves out the marks that its message adds."""
    marked = _MARK.sub(_visible, template)
    text, spans = _marked(write(messages, chat_template=marked))
    if text != write(messages):
        raise ValueError("the marks {% generation %} of the chat template change its text")
    answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if all(is_learned(messages[number]) for number in answers):
        return text, spans
    kept: list[Span] = []
    seen: list[Span] = []
    for number in answers:
        _, until = _marked(write(messages[: number + 1], chat_template=marked))
        if until != spans[: len(until)]:
            break
        kept += until[len(seen) :] if is_learned(messages[number]) else []
        seen = until
    if seen != spans:
        raise ValueError(
            "weight: 0 cannot be kept: the chat template marks other answers once a turn is added"
        )
    return text, kept


def _marked(written: str) -> tuple[str, list[Span]]:
    """Return a text without the characters of marks, and the stretches between them."""
    pieces = re.split(f"[{_BEGIN}{_END}]", written)
    places = np.cumsum([0, *map(len, pieces)]).tolist()
    return "".join(pieces), list(zip(places[1::2], places[2::2], strict=False))


def _visible(mark: re.Match[str]) -> str:
    """Write a character where a mark stands, with the same control of the space around it."""
    left, ends, right = mark.groups()
    return f"{{%{left} if true %}}{_END if ends else _BEGIN}{{% endif {right}%}}"


def _template_options(given: Any) -> dict[str, Any]:
    if not given:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"chat_template_kwargs is {type(given).__name__}: needed is a mapping")
    if taken := [key for key in given if key in _OWN]:
        raise ValueError(f"chat_template_kwargs: {taken[0]!r} cannot be given there")
    return {key: value for key, value in given.items() if value is not None}


def _differs(write: Write, messages: list[Message], others: list[Message], **changed: Any) -> bool:
    """Return whether other messages make another text, or none at all."""
    try:
        return write(messages) != write(others, **changed)
    except Exception:  # of any class: templates raise their own
        return True
