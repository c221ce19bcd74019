"""Validation of a run: which held-out samples it reads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

from kenotron_data import Concatenated, Dataset, Subset
from kenotron_engine import Validation, evaluate
from kenotron_train.assemble import Training
from kenotron_train.data.stage_dataset import open_validation


def validate(training: Training, held_out: Mapping[str, Dataset]) -> Validation | None:
    """Loss on ``limit_val_batches`` global batches, shared by the sources; None: there are none.

    Each source gives its first samples, as many as its share of all, and at least one. Changes
    nothing that training depends on. Collective over the mesh.
    """
    config = training.config
    limit = config.tokens.limit_val_batches
    if not held_out or not limit:
        return None
    counts = _shares([len(data) for data in held_out.values()], limit * config.global_batch_size)
    parts: dict[str, Dataset] = {
        name: Subset(data, 0, count)
        for (name, data), count in zip(held_out.items(), counts, strict=True)
        if count
    }

    def measure() -> Validation:
        batches = open_validation(config, training.mesh, Concatenated(parts))
        return evaluate(training, itertools.islice(batches, limit), tuple(parts))

    found, section = measure(), config.optimizer.weight_average
    if training.averages is None or section is None or not section.validate:
        return found
    with training.averages.in_place():
        return replace(found, averaged=measure().loss)


def _shares(sizes: list[int], most: int) -> list[int]:
    """How many samples of each source: in proportion, at least one while there is room."""
    if sum(sizes) <= most:
        return sizes
    if most <= len(sizes):
        return [int(place < most) for place in range(len(sizes))]
    left, total = most - len(sizes), sum(sizes) - len(sizes)
    return [1 + left * (size - 1) // total for size in sizes]
