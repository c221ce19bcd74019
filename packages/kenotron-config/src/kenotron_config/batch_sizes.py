"""Samples of a global batch: the same number, by stage, or growing with samples read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from kenotron_config.parallelism_section import ParallelismConfig
from kenotron_config.sections import TokensConfig
from kenotron_data.config import DatasetStageConfig


def room_for(samples: int, rows: int) -> int:
    """Return the micro-batches that have room for samples, of ``rows`` over all data ranks each."""
    return -(-samples // rows)


class BatchSizes:
    """Samples of the global batches of a training: a function of its config alone.

    Args:
        dp: data ranks.
        tokens: the full batch, the ramp and the number of steps.
        stages: their first steps, and batches of their own.
    """

    def __init__(self, dp: int, tokens: TokensConfig, stages: Sequence[DatasetStageConfig]) -> None:
        self.ramp = tokens.batch_ramp
        self._rows = dp * tokens.micro_batch_size
        counts = [stage.batch_accumulation_per_replica for stage in stages]
        default = tokens.batch_accumulation_per_replica
        batch = tokens.global_batch_size
        self._full = [batch or self._rows * (count or default) for count in counts]
        starts = [stage.start_training_step for stage in stages]
        ends = [*(start - 1 for start in starts[1:]), tokens.train_steps]
        self.steps = [
            max(0, min(end, tokens.train_steps) - start + 1)
            for start, end in zip(starts, ends, strict=True)
        ]
        """Steps of each stage."""

    @cached_property
    def _before(self) -> list[int]:
        """Samples that are read before each stage, and after the last one."""
        found = [0]
        for stage, steps in enumerate(self.steps):
            found.append(found[stage] + self._samples(stage, steps, found[stage]))
        return found

    def at(self, stage: int, consumed: int) -> int:
        """Return the samples of the batch that follows ``consumed`` samples of a stage."""
        return self._size(stage, self._before[stage] + consumed)

    def microbatches(self, stage: int, consumed: int) -> int:
        """Return the micro-batches of each data rank in that batch; the last have padding."""
        return room_for(self.at(stage, consumed), self._rows)

    def full(self, stage: int) -> int:
        """Return the samples of the largest batch of a stage."""
        return self._full[stage]

    @property
    def most_microbatches(self) -> int:
        """Micro-batches of a data rank in the largest batch of the training."""
        return room_for(max(self._full), self._rows)

    def samples(self, stage: int) -> int:
        """Return the samples that the steps of a stage read."""
        return self._before[stage + 1] - self._before[stage]

    def _size(self, stage: int, read: int) -> int:
        """Return the samples of the batch of a stage after all that were ``read``."""
        full = self._full[stage]
        return full if self.ramp is None else min(full, self.ramp.size(read, max(self._full)))

    def _samples(self, stage: int, steps: int, before: int) -> int:
        """Add up batches: one by one while they grow, the rest at once."""
        consumed, ramp = 0, self.ramp
        while steps and ramp is not None and before + consumed < ramp.samples:
            consumed, steps = consumed + self._size(stage, before + consumed), steps - 1
        return consumed + steps * self._full[stage]


def batch_problems(
    parallelism: ParallelismConfig, tokens: TokensConfig, stages: Sequence[DatasetStageConfig]
) -> list[str]:
    """Name sizes that say something else than `tokens.global_batch_size`."""
    batch, rows = tokens.global_batch_size, parallelism.dp * tokens.micro_batch_size
    if batch is None:
        return []
    found, given, room = [], tokens.batch_accumulation_per_replica, room_for(batch, rows)
    if given != room:
        found.append(
            f"tokens.batch_accumulation_per_replica: {given} was given; a global_batch_size of "
            f"{batch} with dp {parallelism.dp} and micro_batch_size {tokens.micro_batch_size} "
            f"makes {room}: remove one of them"
        )
    for number, stage in enumerate(stages):
        if stage.batch_accumulation_per_replica is not None:
            found.append(
                f"data_stages.{number}.batch_accumulation_per_replica: "
                f"{stage.batch_accumulation_per_replica} was given; with tokens.global_batch_size "
                "every stage has that batch: remove one of them"
            )
    return found


def ramp_problems(
    parallelism: ParallelismConfig, tokens: TokensConfig, stages: Sequence[DatasetStageConfig]
) -> list[str]:
    """Name sizes of a ramp that cannot be cut into micro-batches, or that never end."""
    ramp, rows = tokens.batch_ramp, parallelism.dp * tokens.micro_batch_size
    if ramp is None:
        return []
    found = [
        f"tokens.batch_ramp.{name}: {size} was given; it must be a multiple of parallelism.dp x "
        f"tokens.micro_batch_size ({parallelism.dp} x {tokens.micro_batch_size}); choose "
        f"{max(1, round(size / rows)) * rows}, or change one of them"
        for name, size in (("start", ramp.start), ("increment", ramp.increment))
        if size % rows and tokens.global_batch_size is None
    ]
    full = max(map(BatchSizes(parallelism.dp, tokens, stages).full, range(len(stages))))
    if ramp.start >= full:
        found.append(
            f"tokens.batch_ramp.start: {ramp.start} was given; the whole global batch has {full} "
            "samples (tokens.global_batch_size, or dp x micro_batch_size x "
            "batch_accumulation_per_replica), and a ramp begins "
            "below it: lower start, or remove batch_ramp"
        )
    return found
