"""The part of a config that samples, their order and their batches follow from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kenotron_config import BatchSizes, Config, DoReMiConfig, TokenizerConfig, TokensConfig
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

    def ids_of(self, stage: int) -> int:
        """Ids that the data of a stage may have: those of its token files, or the model's."""
        named = getattr(self.stages[stage].data.dataset, "vocab_size", None) or -1
        return named if named > 0 else self.vocab_size

    def stage_at(self, step: int) -> int:
        """Index of the stage that a step, counted from 1, reads."""
        return sum(stage.start_training_step <= step for stage in self.stages) - 1


def data_plan(config: Config) -> DataPlan:
    """Return what the samples of a config's run follow from."""
    doremi, run = config.doremi, Path(config.checkpoints.checkpoints_path)
    given = doremi.reference_losses_path if doremi is not None else None
    return DataPlan(
        stages=config.data_stages,
        sequences=tuple(map(config.sequence_of, range(len(config.data_stages)))),
        tokens=config.tokens,
        batches=config.batches,
        global_batch_size=config.global_batch_size,
        tokenizer=config.tokenizer,
        doremi=doremi,
        losses=run / "reference_losses" if given is None else Path(given),
        vocab_size=config.model.model_config.vocab_size,
        separate_documents=config.decoder.separate_documents,
    )
