"""Loader of the steps: the corpus and the loader of the stage that a run is in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kenotron_data import (
    Batch,
    Corpus,
    Cursor,
    Fingerprint,
    IterableLoader,
    Loader,
    has_index,
    origins,
)
from kenotron_engine import DomainObjective, DomainWeights
from kenotron_train.assemble import TrainingRun
from kenotron_train.data.changed_data import check_data, fingerprint_of
from kenotron_train.data.own_data import Hook
from kenotron_train.data.reference_losses import Reference, open_reference
from kenotron_train.data.stage_dataset import MaskTargets, open_corpus, open_loader
from kenotron_train.log.report import Report
from kenotron_train.progress import Progress


class StageLoader:
    """The stage that is read: its corpus and its loader."""

    def __init__(
        self,
        training: TrainingRun,
        report: Report,
        hook: Hook | None,
        target_mask: MaskTargets | None,
    ) -> None:
        self._training, self._report = training, report
        self._hook, self._target_mask = hook, target_mask
        self._open: OpenStage | None = None

    def stage(self, progress: Progress) -> OpenStage:
        """The stage of the next step, opened where the progress stands.

        Collective over the mesh when a stage is opened. Raises ValueError for other data than those
        that the progress knows.
        """
        number = self._training.data.stage_at(progress.step + 1)
        if self._open is None or self._open.number != number:
            self.close()
            self._open = self._enter(number, progress)
        return self._open

    def close(self) -> None:
        """End what reads ahead."""
        if self._open is not None:
            self._open.loader.close()
        self._open = None

    def _enter(self, number: int, progress: Progress) -> OpenStage:
        training, data, mesh = self._training, self._training.data, self._training.mesh
        stage = data.stages[number]
        with mesh.pulse.busy("reading the corpus"):
            corpus = open_corpus(data, number, self._hook)
        found = fingerprint_of(corpus, mesh)
        if found is not None:
            key, known = f"data_stages.{number} ({stage.name})", progress.data.get(number)
            warning = check_data(key, known, found, accepted=data.accepts_changed)
            self._report.say(warning, "warning")
        cursor = progress.cursor if progress.cursor.stage == number else Cursor(stage=number)
        if not progress.epoch_known and has_index(corpus.training):
            epoch = cursor.consumed // len(corpus.training)
            cursor = Cursor(number, epoch, cursor.consumed)
        reference = open_reference(data, mesh, number, corpus, found, training.plan.spec.z_loss)
        loader = open_loader(data, mesh, corpus, cursor, self._target_mask)
        self._report.say(f"[Training Stage: {stage.name}]")
        if corpus.about:
            self._report.say(corpus.about)
        sequence, seed = data.sequences[number], stage.data.seed
        return OpenStage(number, corpus, loader, sequence, seed, found, reference)


@dataclass(frozen=True)
class OpenStage:
    """A stage that is being read."""

    number: int
    corpus: Corpus
    loader: Loader | IterableLoader
    sequence: int
    seed: int
    """Of the order in which samples are read."""
    fingerprint: Fingerprint | None = None
    """Of what it trains on; None for data without an index."""
    reference: Reference | None = None
    """Losses of the reference, in a proxy run of DoReMi."""

    def objective(self, progress: Progress) -> DomainObjective | None:
        """Return what weighs the batch that begins at ``progress``; None in ordinary runs."""
        weights = progress.state.find(DomainWeights)
        if self.reference is None or weights is None:
            return None
        return self.reference.objective(progress.cursor, weights)

    def next_batch(self, step: int) -> Batch:
        """The batch of a step. Raises ValueError at the end of the data, or for another length."""
        batch = next(self.loader, None)
        if batch is None:
            raise ValueError(
                f"data_stages.{self.number}: the data ended after {self.loader.cursor.consumed} "
                f"samples, before step {step} had its {self.loader.global_batch}: give more, or "
                "lower tokens.train_steps"
            )
        width = batch.tokens_MBS.shape[-1]
        if width != self.sequence:
            raise ValueError(
                f"data_stages.{self.number}: samples have {width + 1} ids, but sequence_length "
                f"{self.sequence} needs {self.sequence + 1}"
            )
        return batch

    def origins(self, samples: list[int]) -> list[dict[str, Any]]:
        """Return where samples are read, given their places in the order of training.

        Data without an index are read in their order: the place is enough, and the list is empty.
        """
        data = self.corpus.training
        return origins(data, samples, self.seed, self.number) if has_index(data) else []
