"""Held-out samples: which they are, and one pass over them."""

from collections.abc import Iterator, Mapping

import numpy as np

from kenotron_data.batch import Batch
from kenotron_data.loader import check_dataset
from kenotron_data.pack import check_fraction
from kenotron_data.row_samples import Dataset
from kenotron_data.row_split import PADDING, RowSplit, TargetMask, read_batch
from kenotron_data.subsets import Subset


def validation_batches(
    dataset: Dataset,
    *,
    micro_batch_size: int,
    microbatches: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    target_mask: TargetMask | None = None,
    vocab_size: int | None = None,
) -> Iterator[Batch]:
    """Iterate once over a dataset in its own order, without shuffling.

    The last global batch is filled with rows of zeros whose labels are all -100 and whose sample
    number is -1, so every data rank gets the same number of batches and micro-batches. Arguments
    and errors are those of `Loader`; they are checked at the call.

    Returns:
        Iterator of ceil(len(dataset) / global batch) batches.
    """
    check_dataset(dataset)
    split = RowSplit(
        micro_batch_size=micro_batch_size,
        microbatches=microbatches,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )
    n = len(dataset)
    numbers = (split.rows(first) for first in range(0, n, split.global_batch))
    return (
        read_batch(dataset, split, np.where(rows < n, rows, PADDING), rows, target_mask, vocab_size)
        for rows in numbers
    )


def hold_out(dataset: Dataset, validation_fraction: float) -> tuple[Subset, Subset | None]:
    """Hold out the last samples of a data set for validation.

    Args:
        dataset: samples in their own order; what is held out does not depend on a seed.
        validation_fraction: share of the samples to hold out, in [0, 1).

    Returns:
        The samples to train on, and the last round(n * fraction) ones, at least one; None in their
        place where the fraction is 0.

    Raises:
        ValueError: the fraction is not in [0, 1), or nothing would be left to train on.
    """
    check_fraction(validation_fraction)
    n = len(dataset)
    if not validation_fraction:
        return Subset(dataset, 0, n), None
    held = max(1, round(n * validation_fraction))
    if held >= n:
        raise ValueError(
            f"a dataset of {n} samples has none to train on once {held} are held out for "
            f"validation_fraction {validation_fraction}: give more data or lower the fraction"
        )
    return Subset(dataset, 0, n - held), Subset(dataset, n - held, n)


def hold_out_each(
    sources: Mapping[str, Dataset], validation_fraction: float | Mapping[str, float]
) -> tuple[dict[str, Dataset], dict[str, Dataset]]:
    """Hold out samples of every source of a mixture.

    Args:
        sources: data sets by name.
        validation_fraction: one share for all, or one for each name; a name that is missing holds
            nothing out.

    Returns:
        The sources to train on, and what is held out, by name; sources of which nothing is held
        out are not in the second.

    Raises:
        ValueError: see `hold_out`; the source is named. A name is unknown.
    """
    given = validation_fraction
    shares = dict(given) if isinstance(given, Mapping) else dict.fromkeys(sources, given)
    if unknown := sorted(set(shares) - set(sources)):
        raise ValueError(f"validation_fraction names {unknown}, but the sources are {[*sources]}")
    training: dict[str, Dataset] = {}
    held: dict[str, Dataset] = {}
    for name, dataset in sources.items():
        try:
            training[name], kept = hold_out(dataset, shares.get(name, 0.0))
        except ValueError as error:
            raise ValueError(f"source {name!r}: {error}") from error
        if kept is not None:
            held[name] = kept
    return training, held
