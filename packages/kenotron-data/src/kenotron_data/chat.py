"""Chats as a tokenizer's template writes them, and which of their tokens are answers."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MARKED = re.compile(r"\{%-?\s*generation\b")
_TEMPLATE = (
    "the chat template changes earlier turns when one is added, so the answers cannot be found: "
    "mark them in the template with {% generation %}"
)

Ids = NDArray[np.integer]


class Chat:
    """Examples of messages: what the assistant says is learned, with what the template ends it by.

    Ids are those of `tokenizer.apply_chat_template(messages)`; the end of sequence is appended if
    the last answer does not have it. Answers are what `{% generation %}` marks in the template; in
    one without marks, what a turn of the assistant adds to the text.

    Args:
        tokenizer: a tokenizer of `transformers` with a chat template.
        column: the column of the messages: dicts with `role` and `content`.

    Raises:
        ValueError: the tokenizer has no template, or is a slow one, which has no text offsets.
    """

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
        self._marked = bool(_MARKED.search(str(tokenizer.chat_template)))

    def encode(self, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Ids, NDArray[np.bool_]]]:
        """Encode conversations. ValueError where one is wrong, or the template's own error."""
        return [self._example(messages) for (messages,) in rows]

    def _example(self, messages: Any) -> tuple[Ids, NDArray[np.bool_]]:
        _check(messages)
        ids, learned = self._by_marks(messages) if self._marked else self._by_turns(messages)
        end = self._tokenizer.eos_token_id
        if end is not None and learned.any() and messages[-1]["role"] == "assistant":
            last = np.flatnonzero(learned)[-1]
            before = np.flatnonzero(~learned[:last])
            answer = ids[before[-1] + 1 if len(before) else 0 :]
            if end not in answer:
                ids, learned = np.append(ids, end), np.append(learned, True)
        return ids, learned

    def _by_marks(self, messages: list[dict[str, Any]]) -> tuple[Ids, NDArray[np.bool_]]:
        found = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return np.array(found["input_ids"]), np.array(found["assistant_masks"], dtype=np.bool_)

    def _by_turns(self, messages: list[dict[str, Any]]) -> tuple[Ids, NDArray[np.bool_]]:
        """Find the stretch of text that each answer adds, and the tokens that begin in it."""
        text = self._written(messages)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = np.array([begin for begin, _ in encoded["offset_mapping"]], dtype=np.int64)
        learned = np.zeros(len(begins), dtype=np.bool_)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise ValueError(
                    "the first message is of the assistant: there is nothing to answer"
                )
            before = self._written(messages[:number], add_generation_prompt=True)
            after = self._written(messages[: number + 1])
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(_TEMPLATE)
            learned |= (begins >= len(before)) & (begins < len(after))
        return np.array(encoded["input_ids"]), learned

    def _written(self, messages: list[dict[str, Any]], **more: Any) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **more)


def _check(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"messages is {type(messages).__name__}: needed is a list of at least one message"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role: needed are role and content")
        if message.get("content") is None:
            raise ValueError(f"message {number} has no content: needed are role and content")
