"""Hooks of a program that trains with this package: to look at a run, or change it."""

from __future__ import annotations

from kenotron_ckpt import SaveReport
from kenotron_config import Config
from kenotron_dist import Mesh
from kenotron_engine import StepResult
from kenotron_train.assemble import TrainingRun
from kenotron_train.progress import Progress


class LifeCycle:
    """Seven moments of a run; override those you need. Every rank calls its own at the same time.

    A method may communicate over the mesh, ``post_save_checkpoint`` excepted. What it raises ends
    the run.
    """

    def pre_init(self, config: Config, mesh: Mesh) -> None:
        """Before the model is built."""

    def post_init(self, training: TrainingRun) -> None:
        """Model and optimizer are built; no checkpoint is loaded yet."""

    def pre_training(self, training: TrainingRun, progress: Progress) -> None:
        """Before the first step: weights are those that it begins with."""

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """After a step and its update; ``progress`` counts it."""

    def pre_save_checkpoint(self, training: TrainingRun, progress: Progress) -> None:
        """Before a checkpoint is taken."""

    def post_save_checkpoint(self, training: TrainingRun, saved: SaveReport) -> None:
        """After a save, on each rank that has found its end: some ranks find it a step later."""

    def post_training(self, training: TrainingRun, progress: Progress) -> None:
        """After the last step, or the one at which the run was stopped; all is saved."""


class HookList(LifeCycle):
    """Several as one, in order."""

    def __init__(self, hooks: tuple[LifeCycle, ...]) -> None:
        self._hooks = hooks

    def pre_init(self, config: Config, mesh: Mesh) -> None:
        """Each one's."""
        for hook in self._hooks:
            hook.pre_init(config, mesh)

    def post_init(self, training: TrainingRun) -> None:
        """Each one's."""
        for hook in self._hooks:
            hook.post_init(training)

    def pre_training(self, training: TrainingRun, progress: Progress) -> None:
        """Each one's."""
        for hook in self._hooks_of("pre_training", training):
            hook.pre_training(training, progress)

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """Each one's."""
        for hook in self._hooks_of("post_train_step", training):
            hook.post_train_step(training, progress, result)

    def pre_save_checkpoint(self, training: TrainingRun, progress: Progress) -> None:
        """Each one's."""
        for hook in self._hooks_of("pre_save_checkpoint", training):
            hook.pre_save_checkpoint(training, progress)

    def post_save_checkpoint(self, training: TrainingRun, saved: SaveReport) -> None:
        """Each one's."""
        for hook in self._hooks_of("post_save_checkpoint", training):
            hook.post_save_checkpoint(training, saved)

    def post_training(self, training: TrainingRun, progress: Progress) -> None:
        """Each one's."""
        for hook in self._hooks_of("post_training", training):
            hook.post_training(training, progress)

    def _hooks_of(self, method: str, training: TrainingRun) -> list[LifeCycle]:
        """Those that override a method. No parameters are in flight then: they may be read, with
        ZeRO stage 3 by ``TrainingRun.parameters`` or ``records``.
        """
        plain = getattr(LifeCycle, method)
        hooks = [hook for hook in self._hooks if getattr(type(hook), method) is not plain]
        if hooks:
            training.optimizer.settle()
        return hooks
