"""Validation of a run: which held-out samples it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kenotron_data import Concatenated, Dataset, Subset, validation_batches
from kenotron_engine import ModelOnMesh, Validation, evaluate
from kenotron_train.assemble import TrainingRun
from kenotron_train.data_plan import DataPlan


def validate(
    training: TrainingRun, held_out: Mapping[str, Dataset], *, averages: bool = True
) -> Validation | None:
    """Loss on ``limit_val_batches`` global batches, shared by the sources; None: there are none.

    Each source gives its first samples, as many as its share of all, and at least one. Changes
    nothing that training depends on. Collective over the mesh.

    Args:
        training: what is trained.
        held_out: samples of each source.
        averages: whether averages of weights, where the config keeps and validates them, are
            measured too. They are exchanged with the weights: not while a checkpoint copies both.
    """
    tokens = training.data.tokens
    rows = tokens.micro_batch_size, tokens.batch_accumulation_per_replica
    found = validate_model(training, training.data, held_out, *rows)
    section = training.optim.weight_average
    measures = averages and section is not None and section.validate
    if found is None or training.averages is None or not measures:
        return found
    with training.averages.in_place():
        averaged = validate_model(training, training.data, held_out, *rows)
    assert averaged is not None
    return replace(found, averaged=averaged.loss)


def validate_model(
    model: ModelOnMesh,
    data: DataPlan,
    held_out: Mapping[str, Dataset],
    micro_batch_size: int,
    microbatches: int,
) -> Validation | None:
    """``validate`` with a model on any layout: the samples are those of the training's layout.

    Args:
        model: the model.
        data: of the training, which says how many samples are read.
        held_out: samples of each source.
        micro_batch_size: rows that a dp rank reads together.
        microbatches: how often it does before the next pass of the pipeline.
    """
    limit = data.tokens.limit_val_batches
    if not held_out or not limit:
        return None
    counts = _shares([len(each) for each in held_out.values()], limit * data.global_batch_size)
    parts: dict[str, Dataset] = {
        name: Subset(each, 0, count)
        for (name, each), count in zip(held_out.items(), counts, strict=True)
        if count
    }
    batches = validation_batches(
        Concatenated(parts),
        micro_batch_size=micro_batch_size,
        microbatches=microbatches,
        dp_rank=model.mesh["dp"].rank,
        dp_size=model.mesh["dp"].size,
        vocab_size=data.vocab_size,
    )
    return evaluate(model, batches, tuple(parts))


def _shares(sizes: list[int], most: int) -> list[int]:
    """Return the samples of each source: in proportion, at least one while there is room."""
    if sum(sizes) <= most:
        return sizes
    if most <= len(sizes):
        return [int(place < most) for place in range(len(sizes))]
    left, total = most - len(sizes), sum(sizes) - len(sizes)
    return [1 + left * (size - 1) // total for size in sizes]
