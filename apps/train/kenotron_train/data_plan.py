"""The part of a config that samples, their order and their batches follow from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kenotron_config import BatchSizes, DoReMiConfig, TokenizerConfig, TokensConfig
from kenotron_data.config import DatasetStageConfig


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """Data of the stages of a run, and their batches."""

    stages: tuple[DatasetStageConfig, ...]
    sequences: tuple[int, ...]
    """Tokens of a sample in each stage."""
    tokens: TokensConfig
    batches: BatchSizes
    global_batch_size: int
    """Samples of one update, over all ranks, in stages without a batch of their own."""
    tokenizer: TokenizerConfig
    doremi: DoReMiConfig | None
    losses: Path
    """Folder of the reference's losses, in a run of DoReMi."""
    vocab_size: int
    separate_documents: bool
    """True: the model keeps the documents of a sample apart."""
    accepts_changed: bool
    """True: a run that resumes may read other data than before."""

    def ids_of(self, stage: int) -> int:
        """Ids that the data of a stage may have: those of its token files, or the model's."""
        named = getattr(self.stages[stage].data.dataset, "vocab_size", None) or -1
        return named if named > 0 else self.vocab_size

    def stage_at(self, step: int) -> int:
        """Index of the stage that a step, counted from 1, reads."""
        return sum(stage.start_training_step <= step for stage in self.stages) - 1
