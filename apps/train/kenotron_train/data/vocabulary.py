"""The tokenizer of a run, and whether the model has room for its ids."""

from __future__ import annotations

from typing import Any

from kenotron_config import Config
from kenotron_data import ShortenedTokens, TextTokenizer, open_tokenizer, open_transformers
from kenotron_data.config import PretrainDatasetsConfig, SFTDatasetsConfig

KEY = "tokenizer.tokenizer_name_or_path"
BYTES = "bytes"
END_OF_BYTES = 256
"""The id that ends a document of bytes, where the model has it."""


def reads_text(config: Config) -> bool:
    """Whether any stage reads text, so that something must make tokens of it."""
    kinds = (PretrainDatasetsConfig, SFTDatasetsConfig)
    return any(isinstance(stage.data.dataset, kinds) for stage in config.data_stages)


def text_tokenizer(config: Config) -> TextTokenizer:
    """What makes tokens of documents: the configured tokenizer, or bytes.

    A document ends where the tokenizer names a token for that; bytes end with 256 where the
    vocabulary has it. ``tokenizer_max_length`` cuts documents.

    Raises ValueError naming the key.
    """
    tokenizer = _named(config)
    longest = config.tokenizer.tokenizer_max_length
    if longest is None:
        return tokenizer
    return ShortenedTokens(tokenizer=tokenizer, longest=longest)


def answer_tokenizer(config: Config) -> Any:
    """What makes tokens of prompts and chats: one of transformers where it has a name.

    Raises ValueError naming the key, also where it names no token that ends an answer.
    """
    section = config.tokenizer
    name = section.tokenizer_name_or_path
    if _is_bytes(name) or str(name).endswith(".json"):
        opened = _named(config)
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


def check_vocabulary(config: Config) -> None:
    """Open the tokenizer, where text is read, and hold its size against the model's vocabulary.

    Raises ValueError naming both keys.
    """
    name, size = config.tokenizer.tokenizer_name_or_path, config.model.model_config.vocab_size
    if _is_bytes(name) or not reads_text(config):
        return
    needed = _named(config).vocab_size
    if needed > size:
        raise ValueError(
            f"model.model_config.vocab_size: {size} was given; {KEY} ({name}) has {needed} ids; "
            f"raise vocab_size to at least {needed}, or choose another tokenizer"
        )


def _is_bytes(name: str | None) -> bool:
    return name is None or name == BYTES


def _named(config: Config) -> TextTokenizer:
    section = config.tokenizer
    name = section.tokenizer_name_or_path
    has_room = config.model.model_config.vocab_size > END_OF_BYTES
    if name is None:
        return open_tokenizer(BYTES, end_of_document=has_room)
    ends = has_room if name == BYTES else None
    try:
        return open_tokenizer(name, revision=section.tokenizer_revision, end_of_document=ends)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{KEY}: {error}") from error
