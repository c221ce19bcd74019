"""The order of samples: a keyed permutation of [0, n) that is computed per index.

A Feistel network on Z_a x Z_b with a = ceil(sqrt n) and b = ceil(n / a), 8 rounds, with cycle
walking (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). Nothing is stored, so an
epoch of 10**12 samples costs no memory and a run resumes at any place at once. From n = 33 up the
places, neighbours and pairs of 40,000 keys are as even as chance; among fewer samples, some orders
are likelier than others.
"""

from math import isqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kenotron_data.hashing import UInt64Array, below, derive_keys, mix64

ROUNDS = 8
LARGEST = 2**62

Int64Array = NDArray[np.int64]


def permutation_key(seed: int, epoch: int, source: int | str = 0) -> UInt64Array:
    """Return the key of one epoch's order: 8 round keys, a pure function of the arguments."""
    return derive_keys("permutation", seed, epoch, source, count=ROUNDS)


def permute(i: ArrayLike, n: int, key: UInt64Array) -> Int64Array:
    """Return the places to which a keyed permutation of [0, n) sends the indices `i`.

    Args:
        i: indices in [0, n), an integer or an array of any shape.
        n: size of the permuted range, from 1 to 2**62.
        key: round keys of `permutation_key`.

    Returns:
        int64 array of the shape of `i`; over all of [0, n) each value occurs exactly once.

    Raises:
        ValueError: `n` or an index is out of range, or the key has not 8 round keys.
    """
    return _walk(i, n, key, inverse=False)


def inverse_permute(i: ArrayLike, n: int, key: UInt64Array) -> Int64Array:
    """Return the indices that `permute` sends to `i`: arguments, result and errors as there."""
    return _walk(i, n, key, inverse=True)


def _walk(i: ArrayLike, n: int, key: UInt64Array, *, inverse: bool) -> Int64Array:
    """Apply the network until every index has come back into [0, n)."""
    if not 1 <= n <= LARGEST:
        raise ValueError(f"cannot permute {n} samples: the number must be from 1 to 2**62")
    if key.shape != (ROUNDS,):
        raise ValueError(
            f"the key has shape {key.shape}, needed are {ROUNDS} round keys of permutation_key()"
        )
    given = np.asarray(i, dtype=np.int64)
    if given.size and not (0 <= given.min() and given.max() < n):
        raise ValueError(
            f"sample indices from {given.min()} to {given.max()} are not all in [0, {n})"
        )
    a = isqrt(n - 1) + 1
    b = -(-n // a)
    out = _network(given.ravel().astype(np.uint64), a, b, key, inverse=inverse)
    outside = np.flatnonzero(out >= n)
    while outside.size:
        out[outside] = _network(out[outside], a, b, key, inverse=inverse)
        outside = outside[out[outside] >= n]
    return out.astype(np.int64).reshape(given.shape)


def _network(x: UInt64Array, a: int, b: int, key: UInt64Array, *, inverse: bool) -> UInt64Array:
    """Permute [0, a * b): every round shifts one half by a keyed hash of the other half."""
    size_a, size_b = np.uint64(a), np.uint64(b)
    left = x // size_b  # in Z_a
    right = x - left * size_b  # in Z_b
    for turn in reversed(range(ROUNDS)) if inverse else range(ROUNDS):
        if turn % 2 == 0:
            left = _shift(left, right, size_a, key[turn], inverse=inverse)
        else:
            right = _shift(right, left, size_b, key[turn], inverse=inverse)
    return left * size_b + right


def _shift(
    moved: UInt64Array, other: UInt64Array, size: np.uint64, key: np.uint64, *, inverse: bool
) -> UInt64Array:
    """Add a keyed hash of `other` to `moved` modulo `size`, or subtract it again."""
    step = below(mix64(other + key), int(size))
    moved = moved + (size - step if inverse else step)
    return np.where(moved >= size, moved - size, moved)
