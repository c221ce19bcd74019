"""In which order samples are read: a function of the seed, the stage and the place alone."""

from collections.abc import Iterator

import numpy as np

from kenotron_data.row_samples import Dataset, Int64Array
from kenotron_data.row_split import PADDING, RowSplit
from kenotron_data.sampler import permutation_key, permute

_BLOCK = 1 << 13
"""Samples whose order is computed in one call; one call costs as much as some 5,000 samples."""


def shuffled(places: Int64Array, n: int, seed: int, source: int | str) -> Int64Array:
    """Return which samples come at places of an endless list of shuffled epochs.

    Args:
        places: (R,) places from 0.
        n: samples of an epoch. Place p is place p % n of the permutation of epoch p // n.
        seed: the order's seed.
        source: number or name that separates streams of one seed.

    Returns:
        (R,) int64 indices in [0, n).
    """
    epochs = places // n
    within = places - epochs * n
    first = int(epochs[0]) if len(epochs) else 0
    if (epochs == first).all():
        return permute(within, n, permutation_key(seed, first, source))
    indices = np.empty_like(places)
    for epoch in np.unique(epochs):
        rows = epochs == epoch
        indices[rows] = permute(within[rows], n, permutation_key(seed, int(epoch), source))
    return indices


def ordered_indices(dataset: Dataset, places: Int64Array, seed: int, stage: int) -> Int64Array:
    """Return the indices of the samples at places of a stage's order: (R,) to (R,) int64.

    A data set with an order of its own, such as a mixture, names it; others are shuffled.
    """
    own = getattr(dataset, "order", None)
    if own is not None:
        return own(places, seed, stage)
    return shuffled(places, len(dataset), seed, stage)


def tasks(
    dataset: Dataset, split: RowSplit, seed: int, stage: int, consumed: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield what to read for one batch after the other, without end.

    The order of many batches is computed at a time, of the first few alone, so that the first
    comes at once.

    Yields:
        (R,) global sample numbers, -1 for padding, and (R,) indices in the data set.
    """
    most = 1
    while True:
        cut, batches = split.at(consumed), 1
        while batches < most and split.at(consumed + batches * cut.global_batch) == cut:
            batches += 1
        samples = cut.rows(consumed, batches)
        places = np.where(samples == PADDING, consumed, samples)  # any one has the length
        indices = ordered_indices(dataset, places, seed, stage)
        for start in range(0, len(samples), cut.own):
            yield samples[start : start + cut.own], indices[start : start + cut.own]
        consumed += batches * cut.global_batch
        most = min(4 * most, max(1, _BLOCK // cut.own))
