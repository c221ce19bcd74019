"""Byte tokens: text to ids and back without a tokenizer file. N is the number of tokens."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

END_OF_DOCUMENT = 256
"""The token after each document, where the vocabulary has room for it."""

TokenArray = NDArray[np.uint16] | NDArray[np.uint32]

_BYTES = 256
_NEVER_IN_UTF8 = 0xFF


def encode(documents: Iterable[str], vocab_size: int) -> NDArray[np.uint16]:
    """Encode documents as one stream of byte tokens.

    Args:
        documents: texts, in the order of the stream.
        vocab_size: size of the model's vocabulary. Ids 0 to 255 are UTF-8 bytes; where it is
            larger than 256, id 256 ends every document.

    Returns:
        (N,) uint16 ids.

    Raises:
        ValueError: the vocabulary cannot hold 256 bytes, or a text cannot be written as UTF-8.
    """
    if vocab_size < _BYTES:
        raise ValueError(
            f"byte tokens need a vocabulary of at least 256 ids, but vocab_size is {vocab_size}: "
            "raise the model's vocab_size to 256, or to 257 to mark the end of documents"
        )
    end = np.full(int(vocab_size > _BYTES), END_OF_DOCUMENT, dtype=np.uint16)
    pieces = [np.empty(0, dtype=np.uint16)]
    for number, document in enumerate(documents):
        try:
            data = document.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"document {number} cannot be written as UTF-8 at character {error.start}: "
                f"{error.reason}"
            ) from error
        pieces += [np.frombuffer(data, dtype=np.uint8).astype(np.uint16), end]
    return np.concatenate(pieces)


def decode(ids: Sequence[int] | NDArray[np.integer]) -> str:
    """Decode byte tokens to text.

    Args:
        ids: (N,) ids of any integer type. 256 ends a document and gives no text; ids above 256
            and bytes that are no UTF-8 become U+FFFD.

    Returns:
        The text, documents joined without a separator.

    Raises:
        ValueError: the ids have not one dimension, or one is negative.
    """
    array = np.asarray(ids, dtype=np.int64)
    if array.ndim != 1:
        raise ValueError(f"decode() takes ids of one dimension, but their shape is {array.shape}")
    if array.size and array.min() < 0:
        raise ValueError(f"token ids are 0 or more, but {array.min()} was given to decode()")
    ends = np.flatnonzero(array == END_OF_DOCUMENT)
    data = np.where(array < _BYTES, array, _NEVER_IN_UTF8).astype(np.uint8)
    documents = np.split(np.delete(data, ends), ends - np.arange(len(ends)))
    return "".join(document.tobytes().decode("utf-8", errors="replace") for document in documents)
