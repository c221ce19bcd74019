"""A byte-level BPE trained on the documents at hand."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from kenotron_data.text_pieces import TextPiece
from kenotron_data.tokenise import identity_of, write_json
from kenotron_data.tokenise_part import texts_of

END_TOKEN = "<|endoftext|>"
"""The token that ends a document in tokenizers that are trained here."""
_SMALLEST = 256 + 1


def trained_bpe(
    parts: Sequence[Sequence[TextPiece]],
    vocab_size: int,
    path: Path,
    *,
    most_bytes: int = 1 << 30,
    overwrite: bool = False,
) -> None:
    """Train a byte-level BPE unless the file is there, of the same text and sizes.

    A note next to the file, `<path>.note`, names what it was trained on. Arguments and errors are
    those of `train_bpe`.

    Raises:
        FileExistsError: the file was trained on something else, and `overwrite` is False.
    """
    note_file = path.with_name(f"{path.name}.note")
    note = {"data": identity_of([parts]), "vocab_size": vocab_size, "most_bytes": most_bytes}
    if path.exists() and not overwrite:
        if note_file.is_file() and json.loads(note_file.read_text(encoding="utf-8")) == note:
            return
        raise FileExistsError(
            f"{str(path)!r} exists and was not trained on this text with vocab_size {vocab_size}: "
            "name it as the tokenizer, delete it, or say that it shall be overwritten"
        )
    train_bpe(parts, vocab_size, path, most_bytes=most_bytes)
    write_json(note_file, note)


def train_bpe(
    parts: Sequence[Sequence[TextPiece]], vocab_size: int, path: Path, *, most_bytes: int = 1 << 30
) -> int:
    """Train a byte-level BPE and write its `tokenizer.json`.

    Any text can be encoded: the 256 bytes are in the vocabulary, before what is learned, and
    `<|endoftext|>` is id 0.

    Args:
        parts: the documents. Each part gives the same share of the text, its beginning.
        vocab_size: ids, 257 or more; fewer where the text has not so many pairs.
        path: the file to write; it appears when it is whole.
        most_bytes: text that is read, in bytes of UTF-8: memory and time grow with it.

    Returns:
        Ids of the vocabulary.

    Raises:
        ImportError: `tokenizers` is not installed.
        ValueError: the vocabulary is too small, or a row is wrong.
    """
    if vocab_size < _SMALLEST:
        raise ValueError(
            f"a byte-level BPE needs a vocabulary of at least {_SMALLEST} ids (256 bytes and "
            f"{END_TOKEN}), but {vocab_size} was asked for"
        )
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError(
            "training a tokenizer needs tokenizers: install it, or kenotron-data[hub]"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_beginnings(parts, most_bytes), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    tokenizer.save(str(partial))
    partial.replace(path)
    return tokenizer.get_vocab_size()


def _beginnings(parts: Sequence[Sequence[TextPiece]], most_bytes: int) -> Iterator[str]:
    """Yield texts until each part has given its share; the last one may be cut."""
    share = max(1, most_bytes // max(1, len(parts)))
    for part in parts:
        left = share
        for text in texts_of(part):
            data = text.encode("utf-8")
            yield text if len(data) <= left else data[:left].decode("utf-8", errors="ignore")
            left -= len(data)
            if left <= 0:
                break
