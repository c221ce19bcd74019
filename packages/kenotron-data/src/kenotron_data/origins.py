"""Places in which the samples of a batch were read, to find the cause of a step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kenotron_data.order import ordered_indices
from kenotron_data.row_samples import Dataset, describe, source_names, source_of


def origins(dataset: Dataset, places: Sequence[int], seed: int, stage: int) -> list[dict[str, Any]]:
    """Say where samples at places of a stage's order are read.

    Returns:
        For each: `sample`, its place; `index`, its number in the data set; `source`, the name of
        its source, empty where there is one only; `where`, the data set's description of it: file,
        document and token, or rows.
    """
    indices = ordered_indices(dataset, np.array(places, dtype=np.int64), seed, stage)
    names, sources = source_names(dataset), source_of(dataset, indices).tolist()
    return [
        {"sample": place, "index": i, "source": names[of], "where": describe(dataset, i)}
        for place, i, of in zip(places, indices.tolist(), sources, strict=True)
    ]
