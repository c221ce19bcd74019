"""Progress of a run: everything but tensors that a checkpoint must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kenotron_config import DoReMiConfig
from kenotron_data import Cursor, Fingerprint
from kenotron_engine import DomainWeights, StepResult
from kenotron_optim import LossScale, OptimizerConfig, Policy, SpikeGuard, StepState

NEEDED = ("step", "cursor", "consumed_train_samples", "consumed_tokens")
"""Keys that no checkpoint of a run lacks."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run; the same on every rank."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    """Place in the data."""
    samples: int = 0
    """Samples read in all, over all ranks and stages."""
    tokens: int = 0
    epoch_known: bool = True
    """False: the checkpoint is another program's, and the size of the data set gives the epoch."""
    schedule_start: int = 0
    """The step after which the learning-rate schedule began."""
    state: StepState = field(default_factory=StepState)
    """Values that decide about the next step, and weights of the losses of its domains."""
    left_out: tuple[Cursor, ...] = ()
    """Beginnings of the batches that are not trained on: a rollback for each."""
    data: Mapping[int, Fingerprint] = field(default_factory=dict)
    """Fingerprints of the data of stages that were read, by the stage's number."""

    def after(self, cursor: Cursor, result: StepResult, sequence: int) -> Progress:
        """One step later, which read samples of ``sequence`` tokens up to ``cursor``."""
        before = self.cursor.consumed if self.cursor.stage == cursor.stage else 0
        samples = cursor.consumed - before
        return replace(
            self,
            step=self.step + 1,
            cursor=cursor,
            samples=self.samples + samples,
            tokens=self.tokens + samples * sequence,
            epoch_known=True,
            state=self.state.after(result),
        )

    def past(self, cursor: Cursor) -> Progress:
        """After a batch that is left out: the place in the data is another one, and no more."""
        return replace(self, cursor=cursor)

    def with_data(self, stage: int, found: Fingerprint | None) -> Progress:
        """Progress with the data of a stage; ``found`` is None for data without an index."""
        if found is None or self.data.get(stage) == found:
            return self
        return replace(self, data={**self.data, stage: found})

    def to_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {
            "step": self.step,
            "schedule_start": self.schedule_start,
            "cursor": self.cursor.to_dict(),
            "consumed_train_samples": self.samples,
            "consumed_tokens": self.tokens,
            "left_out": [cursor.to_dict() for cursor in self.left_out],
            "data": {str(stage): found.to_dict() for stage, found in self.data.items()},
            **self.state.to_dict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], fresh: StepState) -> Progress:
        """Undo ``to_state``; ``fresh`` is the state of a first step.

        Raises ValueError for values that make no sense.
        """
        return cls(
            int(state["step"]),
            Cursor.from_dict(state["cursor"]),
            int(state["consumed_train_samples"]),
            int(state["consumed_tokens"]),
            epoch_known="imported" not in state,
            schedule_start=int(state.get("schedule_start", 0)),
            state=fresh.restored(state),
            left_out=tuple(map(Cursor.from_dict, state.get("left_out", ()))),
            data={
                int(stage): Fingerprint.from_dict(found)
                for stage, found in state.get("data", {}).items()
            },
        )


def fresh_state(
    optim: OptimizerConfig, dtype: torch.dtype, doremi: DoReMiConfig | None
) -> StepState:
    """Return the state that decides about the first step of a run."""
    found: list[Policy] = []
    if dtype == torch.float16:
        found.append(LossScale.start(optim.loss_scale))
    if optim.spikes is not None:
        found.append(SpikeGuard(optim.spikes))
    if doremi is not None and doremi.is_proxy:
        found.append(DomainWeights.start(doremi.names, doremi.step_size, doremi.smoothing_param))
    return StepState(tuple(found))
