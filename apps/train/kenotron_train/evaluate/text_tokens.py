"""Texts of tasks as tokens: as lm-eval makes them of a tokenizer of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kenotron_data import (
    END_OF_DOCUMENT,
    decode,
    encode,
    open_tokenizer,
    open_transformers,
)

BYTES = "bytes"


@dataclass(frozen=True)
class TextTokens:
    """Conversion of texts to tokens, and back."""

    to_ids: Callable[[str, bool | None], list[int]]
    """Tokens of a text; with or without special tokens; None: as the tokenizer does by itself."""
    to_text: Callable[[Sequence[int]], str]
    """Text of tokens, without special tokens."""
    ends: frozenset[int]
    """Tokens that end a text: the tokenizer's, and those of its generation_config.json."""
    begin: int | None
    """Token that stands before a text without a context; None: the tokenizer names none."""
    end_text: str = ""
    """Text of the token that ends a text."""


def open_text_tokens(name: str | None, revision: str | None, vocab_size: int) -> TextTokens:
    """Open a tokenizer for tasks.

    Args:
        name: a folder or a name that transformers loads, a ``tokenizer.json``, or ``bytes``;
            None: bytes.
        revision: of a name of the hub.
        vocab_size: of the model; bytes have an end where it has room for 256.

    Raises:
        ValueError: there is no such tokenizer.
        ImportError: a library is missing.
    """
    if name is None or name == BYTES:
        end = END_OF_DOCUMENT if vocab_size > END_OF_DOCUMENT else None
        return TextTokens(lambda text, _: encode([text], 256).tolist(), decode, _known(end), end)
    if Path(name).suffix == ".json":
        return _tokenizers_file(name)
    return _transformers(open_transformers(name, revision), _generation_ends(name))


def _tokenizers_file(name: str) -> TextTokens:
    opened: Any = open_tokenizer(name, end_of_document=None)
    inner, end = opened.backend, opened.end
    return TextTokens(
        lambda text, special: inner.encode(text, add_special_tokens=special is not False).ids,
        lambda ids: inner.decode(list(ids), skip_special_tokens=True),
        _known(end),
        end,
        "" if end is None else inner.id_to_token(end),
    )


def _known(*ends: int | None) -> frozenset[int]:
    return frozenset(end for end in ends if end is not None)


def _generation_ends(name: str) -> frozenset[int]:
    """Tokens at which transformers ends a text, of a tokenizer's folder: chat models have several.

    Raises ValueError for a file that is damaged.
    """
    path = Path(name) / "generation_config.json"
    if not path.is_file():
        return frozenset()
    try:
        found = json.loads(path.read_text()).get("eos_token_id")
        return _known(*found) if isinstance(found, list) else _known(found)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no configuration of transformers: {error}") from error


def _transformers(opened: Any, generation_ends: frozenset[int]) -> TextTokens:
    end = opened.eos_token_id
    begin = end if opened.bos_token_id is None else opened.bos_token_id
    begin_text = None if begin is None else opened.decode([begin])

    def to_ids(text: str, special: bool | None) -> list[int]:
        if special is None and begin_text and text.startswith(begin_text):
            special = False  # the text has it already
        options = {} if special is None else {"add_special_tokens": special}
        return list(opened.encode(text, **options))

    return TextTokens(
        to_ids,
        lambda ids: opened.decode(list(ids), skip_special_tokens=True),
        _known(end) | generation_ends,
        begin,
        "" if end is None else opened.decode([end]),
    )
