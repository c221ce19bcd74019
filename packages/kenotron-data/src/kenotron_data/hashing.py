"""Keyed 64-bit hashing over numpy arrays: what sample order and synthetic tokens are drawn from."""

import hashlib

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_HALF = np.uint64(32)


def derive_keys(*words: int | str, count: int) -> UInt64Array:
    """Derive `count` (at most 8) independent 64-bit keys from words such as a seed and a name.

    The result is BLAKE2b of the words written out: the same on every machine and in every version
    of Python. The number 1 and the text "1" give different keys.
    """
    text = "\x00".join(
        f"str:{word}" if isinstance(word, str) else f"int:{word:d}" for word in words
    )
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8 * count).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def mix64(x: UInt64Array) -> UInt64Array:
    """Hash every element by the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).

    `x` is an array of at least one dimension (numpy warns of overflow on scalars only).
    """
    x = (x ^ (x >> _SHIFTS[0])) * _FIRST
    x = (x ^ (x >> _SHIFTS[1])) * _SECOND
    return x ^ (x >> _SHIFTS[2])


def below(hashes: UInt64Array, bound: int) -> UInt64Array:
    """Map hashes to [0, bound) by their upper 32 bits; `bound` is at most 2**32."""
    return ((hashes >> _HALF) * np.uint64(bound)) >> _HALF
