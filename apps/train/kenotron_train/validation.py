"""Loss on samples that are held out: which are read, and what comes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kenotron_data import Batch, Concatenated, Dataset, Subset
from kenotron_dist import all_reduce
from kenotron_train.assemble import Training
from kenotron_train.corpus import open_validation
from kenotron_train.step import NO_TARGET, contexts_of, token_losses


@dataclass(frozen=True)
class Validation:
    """Mean cross entropy over the targets of held-out samples; the same on every rank."""

    loss: float
    """Over all targets, in nats a token."""
    sources: dict[str, float] = field(default_factory=dict)
    """Over those of each source."""

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that is no float any more."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """exp(loss); inf where that is no float any more."""
    return math.exp(loss) if not loss > 700 else math.inf


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
    batches = open_validation(config, training.mesh, Concatenated(parts))
    return evaluate(training, itertools.islice(batches, limit), tuple(parts))


def evaluate(training: Training, batches: Iterable[Batch], names: tuple[str, ...]) -> Validation:
    """Mean cross entropy over the targets of all ``batches``, in all and of each source.

    ``names`` are those of the sources that rows are tagged with. Collective over the mesh.
    """
    mesh = training.mesh
    total = torch.zeros(len(names), 2, dtype=torch.float64, device=mesh.device)
    for on_host in batches:
        batch = on_host.to(mesh.device)
        inputs = [micro.tokens_BS.flatten() for micro in batch]
        whole = _summing(training, batch, total)
        training.model.pipeline.evaluate(inputs, whole, contexts_of(batch))
    # Only ranks with the last layer have seen a loss.
    total = all_reduce(total, mesh["pp", "dp", "cp"])
    losses, counts = total.unbind(-1)
    each = {
        name: float(loss / count)
        for name, loss, count in zip(names, losses, counts, strict=True)
        if count
    }
    return Validation(float(losses.sum() / counts.sum()), each)


def _summing(training: Training, batch: Batch, total: Tensor) -> Callable[[Tensor, int], Tensor]:
    """A loss that adds sums and numbers of targets of each source to ``total`` (K, 2)."""

    def loss(hidden: Tensor, microbatch: int) -> Tensor:
        micro = batch[microbatch]
        labels = micro.labels_BS
        per_row = token_losses(training, hidden, labels).view_as(labels).double().sum(-1)
        seen = torch.stack([per_row, (labels != NO_TARGET).sum(-1).double()], -1)
        sources = micro.sources_B
        assert sources is not None, "validation_batches tags every row"
        total.index_add_(0, sources.clamp_min(0), seen * (sources >= 0)[:, None])
        return per_row.sum()

    return loss


def _shares(sizes: list[int], most: int) -> list[int]:
    """How many samples of each source: in proportion, at least one while there is room."""
    if sum(sizes) <= most:
        return sizes
    if most <= len(sizes):
        return [int(place < most) for place in range(len(sizes))]
    left, total = most - len(sizes), sum(sizes) - len(sizes)
    return [1 + left * (size - 1) // total for size in sizes]
