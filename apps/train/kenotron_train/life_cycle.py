"""Where a program that trains with this package may look in, or change something."""

from __future__ import annotations

from kenotron_ckpt import SaveReport
from kenotron_dist import Mesh
from kenotron_train.assemble import Training
from kenotron_train.config import Config
from kenotron_train.progress import Progress
from kenotron_train.step import StepResult


class LifeCycle:
    """Seven moments of a run; override those you need. Every rank has one and calls it alike.

    A method may communicate over the mesh, ``post_save_checkpoint`` excepted. What it raises ends
    the run.
    """

    def pre_init(self, config: Config, mesh: Mesh) -> None:
        """Before the model is built."""

    def post_init(self, training: Training) -> None:
        """Model and optimizer are built; no checkpoint is loaded yet."""

    def pre_training(self, training: Training, progress: Progress) -> None:
        """Before the first step: weights are those that it begins with."""

    def post_train_step(self, training: Training, progress: Progress, result: StepResult) -> None:
        """After a step and its update; ``progress`` counts it."""

    def pre_save_checkpoint(self, training: Training, progress: Progress) -> None:
        """Before a checkpoint is taken."""

    def post_save_checkpoint(self, training: Training, saved: SaveReport) -> None:
        """When a rank has found that a save ended: some ranks may find so a step later."""

    def post_training(self, training: Training, progress: Progress) -> None:
        """After the last step, or the one at which the run was stopped; all is saved."""


class Together(LifeCycle):
    """Several as one, in order."""

    def __init__(self, hooks: tuple[LifeCycle, ...]) -> None:
        self._hooks = hooks

    def pre_init(self, config: Config, mesh: Mesh) -> None:
        """Each one's."""
        for hook in self._hooks:
            hook.pre_init(config, mesh)

    def post_init(self, training: Training) -> None:
        """Each one's."""
        for hook in self._hooks:
            hook.post_init(training)

    def pre_training(self, training: Training, progress: Progress) -> None:
        """Each one's."""
        for hook in self._hooks:
            hook.pre_training(training, progress)

    def post_train_step(self, training: Training, progress: Progress, result: StepResult) -> None:
        """Each one's."""
        for hook in self._hooks:
            hook.post_train_step(training, progress, result)

    def pre_save_checkpoint(self, training: Training, progress: Progress) -> None:
        """Each one's."""
        for hook in self._hooks:
            hook.pre_save_checkpoint(training, progress)

    def post_save_checkpoint(self, training: Training, saved: SaveReport) -> None:
        """Each one's."""
        for hook in self._hooks:
            hook.post_save_checkpoint(training, saved)

    def post_training(self, training: Training, progress: Progress) -> None:
        """Each one's."""
        for hook in self._hooks:
            hook.post_training(training, progress)
