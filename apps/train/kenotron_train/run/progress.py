"""How far a run has come: everything but tensors that a checkpoint must hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kenotron_config import Config
from kenotron_data import Cursor, Fingerprint
from kenotron_engine import DomainWeights, StepResult
from kenotron_optim import LossScale, SpikeGuard

NEEDED = ("step", "cursor", "consumed_train_samples", "consumed_tokens")
"""What no checkpoint of a run lacks."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come; the same on every rank."""

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
    loss_scale: LossScale | None = None
    """That of the next step, in a float16 run."""
    spikes: SpikeGuard | None = None
    """That of the next step, where spikes are left out."""
    left_out: tuple[Cursor, ...] = ()
    """Where the batches begin that are not trained on: a rollback for each."""
    data: Mapping[int, Fingerprint] = field(default_factory=dict)
    """Fingerprints of the data of stages that were read, by the stage's number."""
    domains: DomainWeights | None = None
    """Weights of domains for the next step, in a proxy run of DoReMi."""

    @classmethod
    def fresh(cls, config: Config) -> Progress:
        """Where a run begins."""
        return cls(
            loss_scale=fresh_scale(config),
            spikes=_fresh_spikes(config),
            domains=fresh_domains(config),
        )

    def after(self, config: Config, cursor: Cursor, result: StepResult) -> Progress:
        """One step later, which read the samples up to ``cursor`` of its stage.

        A step that was left out leaves the weights of domains alone.
        """
        before = self.cursor.consumed if self.cursor.stage == cursor.stage else 0
        samples = cursor.consumed - before
        domains, found = self.domains, result.domains
        if domains is not None and found is not None and found.is_finite and not result.skipped:
            domains = domains.after(found.excess)
        return replace(
            self,
            step=self.step + 1,
            cursor=cursor,
            samples=self.samples + samples,
            tokens=self.tokens + samples * config.sequence_of(cursor.stage),
            epoch_known=True,
            loss_scale=result.loss_scale,
            spikes=result.spikes,
            domains=domains,
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
        """What a checkpoint keeps of it."""
        return {
            "step": self.step,
            "schedule_start": self.schedule_start,
            "cursor": self.cursor.to_dict(),
            "consumed_train_samples": self.samples,
            "consumed_tokens": self.tokens,
            "loss_scale": self.loss_scale.to_dict() if self.loss_scale else None,
            "spikes": self.spikes.to_dict() if self.spikes else None,
            "left_out": [cursor.to_dict() for cursor in self.left_out],
            "data": {str(stage): found.to_dict() for stage, found in self.data.items()},
            "domain_weights": self.domains.to_dict() if self.domains else None,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], config: Config) -> Progress:
        """Undo ``to_state``. Raises ValueError for values that make no sense."""
        saved, fresh = state.get("loss_scale"), fresh_scale(config)
        seen, guard = state.get("spikes"), _fresh_spikes(config)
        weights, even = state.get("domain_weights"), fresh_domains(config)
        return cls(
            int(state["step"]),
            Cursor.from_dict(state["cursor"]),
            int(state["consumed_train_samples"]),
            int(state["consumed_tokens"]),
            epoch_known="imported" not in state,
            schedule_start=int(state.get("schedule_start", 0)),
            loss_scale=LossScale.from_dict(fresh.config, saved) if fresh and saved else fresh,
            spikes=SpikeGuard.from_dict(guard.config, seen) if guard and seen else guard,
            left_out=tuple(map(Cursor.from_dict, state.get("left_out", ()))),
            data={
                int(stage): Fingerprint.from_dict(found)
                for stage, found in state.get("data", {}).items()
            },
            domains=even.restored(weights) if even and weights else even,
        )


def fresh_domains(config: Config) -> DomainWeights | None:
    """The weights of domains of a fresh run; None unless it is a proxy run of DoReMi."""
    doremi = config.doremi
    if doremi is None or not doremi.is_proxy:
        return None
    return DomainWeights.start(doremi.names, doremi.step_size, doremi.smoothing_param)


def fresh_scale(config: Config) -> LossScale | None:
    """The loss scale of a fresh run; None unless it is in float16."""
    if config.model.dtype != "float16":
        return None
    return LossScale.start(config.optimizer.loss_scale)


def _fresh_spikes(config: Config) -> SpikeGuard | None:
    spikes = config.optimizer.spikes
    return None if spikes is None else SpikeGuard(spikes)
