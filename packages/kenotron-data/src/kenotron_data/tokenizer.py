"""Text to ids: byte tokens, files of `tokenizers`, and what `transformers` loads by name."""

import array
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kenotron_data.tokens import END_OF_DOCUMENT, encode
from kenotron_data.transformers_tokenizer import open_transformers
from kenotron_data.word_cache import WordCache, word_cache

Ids: TypeAlias = NDArray[np.integer]

BYTES = "bytes"
"""Name of the tokenizer whose ids are UTF-8 bytes, and 256 for the end of a document."""
_USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class TextTokenizer(Protocol):
    """Tokenizer that turns documents into ids; it can be pickled."""

    @property
    def name(self) -> str:
        """Name that people call it by."""
        ...

    @property
    def vocab_size(self) -> int:
        """A number that is larger than every id."""
        ...

    @property
    def end(self) -> int | None:
        """Id that ends a document; None: nothing does."""
        ...

    @property
    def fingerprint(self) -> str:
        """Text that changes with anything that changes an id."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, its end included; no other special token is added."""
        ...


@dataclass(frozen=True, kw_only=True)
class ByteTokens:
    """UTF-8 bytes, see `tokens.encode`."""

    name: str = BYTES
    end: int | None = END_OF_DOCUMENT

    @property
    def vocab_size(self) -> int:
        """257, or 256 if nothing ends a document."""
        return 256 if self.end is None else END_OF_DOCUMENT + 1

    @property
    def fingerprint(self) -> str:
        """Tell apart with and without ends."""
        return f"bytes:{self.end}"

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [encode([text], self.vocab_size) for text in texts]


@dataclass(frozen=True, kw_only=True)
class FastTokens:
    """A tokenizer of the library `tokenizers`, which neither cuts nor pads here.

    Args:
        backend: `tokenizers.Tokenizer`.
        name: for people.
        end: id that ends a document; None: nothing does.
        vocab_size: larger than every id.
        fingerprint: see `TextTokenizer`.
        words: finds most ids faster; None: the tokenizer finds all.
    """

    backend: Any
    name: str
    end: int | None
    vocab_size: int
    fingerprint: str
    words: WordCache | None = None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text."""
        found = self.words.encode(texts) if self.words else [None] * len(texts)
        left = [place for place, ids in enumerate(found) if ids is None]
        if left:
            backend = self.backend
            make = getattr(backend, "encode_batch_fast", backend.encode_batch)  # no offsets
            made = make([texts[place] for place in left], add_special_tokens=False)
            for place, encoding in zip(left, made, strict=True):
                # By way of `array`: numpy alone takes twice the time for a list of ints.
                found[place] = np.frombuffer(array.array("I", encoding.ids), dtype=np.uint32)
        end = [] if self.end is None else [np.array([self.end], dtype=np.uint32)]
        return [np.concatenate([ids, *end]) for ids in found if ids is not None]


@dataclass(frozen=True, kw_only=True)
class SlowTokens:
    """A tokenizer of `transformers` that is written in Python."""

    tokenizer: Any
    name: str
    end: int | None
    vocab_size: int
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text."""
        end = [] if self.end is None else [self.end]
        return [
            np.array(
                self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end,
                dtype=np.int64,
            )
            for text in texts
        ]


def open_tokenizer(
    name_or_path: str,
    *,
    revision: str | None = None,
    eos_token: str | None = None,
    end_of_document: bool | None = True,
) -> TextTokenizer:
    """Open a tokenizer by its name.

    Args:
        name_or_path: `bytes`; the `.json` file of a tokenizer of the library `tokenizers`; a folder
            or a name of the Hugging Face hub that `transformers` loads.
        revision: branch, tag or commit of a name of the hub; None: the newest.
        eos_token: the token that ends a document; None: the one that the tokenizer names.
        end_of_document: whether a token ends each document; None: if the tokenizer names one.

    Raises:
        ImportError: the library that is needed is not installed.
        ValueError: there is no such tokenizer, the token is not in its vocabulary, or it names no
            token that ends a document.
    """
    if revision is not None and (name_or_path == BYTES or name_or_path.endswith(".json")):
        raise ValueError(
            f"tokenizer {name_or_path!r} has no revisions, but {revision!r} was given: leave it out"
        )
    if name_or_path == BYTES:
        if eos_token is not None:
            raise ValueError(
                f"byte tokens end a document with id 256: leave out eos_token {eos_token!r}"
            )
        return ByteTokens(end=None if end_of_document is False else END_OF_DOCUMENT)
    if (path := Path(name_or_path)).suffix == ".json":
        opened = _tokenizers_file(path)
        eos_token = eos_token or _end_beside(path, opened)
    else:
        opened = open_transformers(name_or_path, revision)
    return wrap_tokenizer(
        opened, name=name_or_path, eos_token=eos_token, end_of_document=end_of_document
    )


def wrap_tokenizer(
    tokenizer: Any,
    *,
    name: str = "",
    eos_token: str | None = None,
    end_of_document: bool | None = True,
) -> TextTokenizer:
    """Take a tokenizer of `transformers` or `tokenizers` that is open already.

    Args:
        tokenizer: a `transformers` tokenizer or a `tokenizers.Tokenizer`; it is not changed.
        name: for people; "" takes the tokenizer's own name.
        eos_token: see `open_tokenizer`.
        end_of_document: see `open_tokenizer`.

    Raises:
        ValueError: see `open_tokenizer`.
    """
    name = name or str(getattr(tokenizer, "name_or_path", "")) or "tokenizer"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None and hasattr(tokenizer, "encode_batch"):
        backend = tokenizer
    vocabulary = tokenizer.get_vocab()
    end = None
    token = eos_token if eos_token is not None else getattr(tokenizer, "eos_token", None)
    if end_of_document or (end_of_document is None and token is not None):
        end = _end_id(name, vocabulary, token)
    size = max(vocabulary.values(), default=-1) + 1
    if backend is None:
        settings = {key: repr(value) for key, value in sorted(tokenizer.init_kwargs.items())}
        said = json.dumps([type(tokenizer).__name__, settings, sorted(vocabulary.items())])
        return SlowTokens(
            tokenizer=tokenizer,
            name=name,
            end=end,
            vocab_size=size,
            fingerprint=_digest(f"{said}:{end}"),
        )
    plain = type(backend).from_str(backend.to_str())  # a copy: the caller's is not changed
    plain.no_truncation()
    plain.no_padding()
    return FastTokens(
        backend=plain,
        name=name,
        end=end,
        vocab_size=size,
        fingerprint=_digest(f"{plain.to_str()}:{end}"),
        words=word_cache(plain),
    )


def without_end(tokenizer: TextTokenizer) -> TextTokenizer:
    """Return the same tokenizer that does not end documents."""
    if isinstance(tokenizer, ByteTokens):
        return replace(tokenizer, end=None)
    changed: Any = tokenizer
    return replace(changed, end=None, fingerprint=f"{tokenizer.fingerprint}:without end")


def tokenizer_libraries(name: str | None) -> list[str]:
    """List the modules that are imported when a tokenizer is opened: none for bytes and None."""
    if name is None or name == BYTES:
        return []
    if Path(name).suffix == ".json":
        return ["tokenizers"]
    return ["transformers.models.auto.tokenization_auto", "transformers.activations"]


def _tokenizers_file(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(
            f"tokenizer {str(path)!r}: install tokenizers, or kenotron-data[hub]"
        ) from error
    if not path.is_file():
        raise ValueError(f"tokenizer {str(path)!r}: there is no such file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(
            f"tokenizer {str(path)!r}: this is no file of the library tokenizers ({error})"
        ) from error


def _end_beside(path: Path, tokenizer: Any) -> str | None:
    """Find the end token of a `tokenizer.json`: in its folder's configuration, or a usual name."""
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        found = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        found = found.get("content") if isinstance(found, dict) else found
        if found:
            return str(found)
    usual = [token for token in _USUAL_ENDS if tokenizer.token_to_id(token) is not None]
    return usual[0] if len(usual) == 1 else None


def _end_id(name: str, vocabulary: dict[str, int], token: str | None) -> int:
    if token is None:
        raise ValueError(
            f"tokenizer {name!r} names no token that ends a document: say which (--eos-token), or "
            "that none shall (--no-eos)"
        )
    if token not in vocabulary:
        raise ValueError(
            f"eos_token {token!r} is not in the vocabulary of tokenizer {name!r}: give one that is"
        )
    return vocabulary[token]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()
