"""The tokenizer of a run, and whether the model has room for its ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kenotron_config import TokenizerConfig
from kenotron_data import ShortenedTokens, TextTokenizer, open_tokenizer, open_transformers
from kenotron_data.config import DatasetStageConfig, PretrainDatasetsConfig, SFTDatasetsConfig
from kenotron_train.data_plan import DataPlan

KEY = "tokenizer.tokenizer_name_or_path"
BYTES = "bytes"
END_OF_BYTES = 256
"""The id that ends a document of bytes, where the model has it."""


def reads_text(stages: Sequence[DatasetStageConfig]) -> bool:
    """Return whether any stage reads text, so that something must make tokens of it."""
    kinds = (PretrainDatasetsConfig, SFTDatasetsConfig)
    return any(isinstance(stage.data.dataset, kinds) for stage in stages)


def text_tokenizer(section: TokenizerConfig, vocab_size: int) -> TextTokenizer:
    """Return what makes tokens of documents: the configured tokenizer, or bytes.

    A document ends where the tokenizer names a token for that; bytes end with 256 where the
    vocabulary has it. ``tokenizer_max_length`` cuts documents.

    Raises ValueError naming the key.
    """
    tokenizer = _named(section, vocab_size)
    longest = section.tokenizer_max_length
    if longest is None:
        return tokenizer
    return ShortenedTokens(tokenizer=tokenizer, longest=longest)


def answer_tokenizer(section: TokenizerConfig, vocab_size: int) -> Any:
    """Return the tokenizer of prompts and chats: one of transformers where it has a name.

    Raises ValueError naming the key, also where it names no token that ends an answer.
    """
    name = section.tokenizer_name_or_path
    if _is_bytes(name) or str(name).endswith(".json"):
        opened = _named(section, vocab_size)
        end = opened.end
    else:
        try:
            opened = open_transformers(str(name), section.tokenizer_revision)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{KEY}: {error}") from error
        end = opened.eos_token
    if end is None:
        raise ValueError(
            f"{KEY}: {name} names no token that ends an answer; give one whose eos_token is set"
        )
    return opened


def check_vocabulary(data: DataPlan) -> None:
    """Open the tokenizer, where text is read, and hold its size against the model's vocabulary.

    Raises ValueError naming both keys.
    """
    name, size = data.tokenizer.tokenizer_name_or_path, data.vocab_size
    if _is_bytes(name) or not reads_text(data.stages):
        return
    needed = _named(data.tokenizer, size).vocab_size
    if needed > size:
        raise ValueError(
            f"model.model_config.vocab_size: {size} was given; {KEY} ({name}) has {needed} ids; "
            f"raise vocab_size to at least {needed}, or choose another tokenizer"
        )


def _is_bytes(name: str | None) -> bool:
    return name is None or name == BYTES


def _named(section: TokenizerConfig, vocab_size: int) -> TextTokenizer:
    name = section.tokenizer_name_or_path
    has_room = vocab_size > END_OF_BYTES
    if name is None:
        return open_tokenizer(BYTES, end_of_document=has_room)
    ends = has_room if name == BYTES else None
    try:
        return open_tokenizer(name, revision=section.tokenizer_revision, end_of_document=ends)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{KEY}: {error}") from error
