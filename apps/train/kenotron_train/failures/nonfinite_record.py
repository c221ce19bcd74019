"""Record of a step whose loss or gradient is not finite, so that it can be replayed.

Shapes: T = B * S rows of a micro-batch.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_ckpt import on_first
from kenotron_data import Batch, Cursor
from kenotron_dist import Mesh, gather_objects
from kenotron_dist.rng import counter_key
from kenotron_optim import NonFinite
from kenotron_train.assemble import TrainingRun
from kenotron_train.data.stage_loader import OpenStage
from kenotron_train.progress import Progress


@dataclass(frozen=True)
class Blame:
    """Contents of a record; the same on every rank."""

    step: int
    cursor: Cursor
    """Place in the data where the batch begins."""
    left_out: tuple[Cursor, ...]
    """Beginnings of the batches that the run had left out before it."""
    samples: list[int]
    """Places of the global batch's samples in the order of training, sorted."""
    data: list[dict[str, Any]]
    """Place in which each of them was read, see ``kenotron_data.origins``."""
    module: str
    """The first module with a value that is not finite; with a gradient, if all values are."""
    found: NonFinite

    def to_dict(self) -> dict[str, Any]:
        """For JSON, where nan is text."""
        found = self.found
        return {
            "step": self.step,
            "loss": repr(found.loss),
            "parameter": found.name,
            "holds": found.held,
            "ranks": list(found.ranks),
            "module": self.module,
            "cursor": self.cursor.to_dict(),
            "left_out": [cursor.to_dict() for cursor in self.left_out],
            "samples": self.samples,
            "data": self.data,
        }


@dataclass(frozen=True)
class TakenBatch:
    """A batch, and where it was taken from."""

    batch: Batch
    stage: OpenStage
    progress: Progress
    """Progress of the run; its cursor is where the batch begins."""

    def blame(self, training: TrainingRun, found: NonFinite) -> Blame:
        """Look for the cause of a step that is not finite. Parameters must be as before it.

        Collective over the mesh: the batch goes through the model once more.
        """
        step = self.progress.step + 1
        return self.about(training, _module(training, self.batch, step) or _owner(found), found)

    def about(self, training: TrainingRun, module: str, found: NonFinite) -> Blame:
        """Return what is known of the step without looking at it. Collective over the mesh."""
        progress, samples = self.progress, samples_of(self.batch, training.mesh)
        with training.mesh.pulse.busy("looking for samples in their files"):
            data = on_first(training.mesh, lambda: _origins(self.stage, samples))
        step, cursor = progress.step + 1, progress.cursor
        return Blame(step, cursor, progress.left_out, samples, data, module, found)


def _origins(stage: OpenStage, samples: list[int]) -> list[dict[str, Any]]:
    """Return where samples were read; a data set without places hides no cause."""
    try:
        return stage.origins(samples)
    except Exception as error:
        return [{"where": f"unknown: {type(error).__name__}: {error}"}]


def samples_of(batch: Batch, mesh: Mesh) -> list[int]:
    """Numbers of the global batch's samples, sorted; padded rows have none. Collective over dp."""
    own = batch.samples_MB.flatten().tolist()
    return sorted(each for rank in gather_objects(own, mesh["dp"]) for each in rank if each >= 0)


def _owner(found: NonFinite) -> str:
    """The module of the parameter that is named."""
    if found.name is None:
        return "loss"
    return found.name.rpartition(".")[0] + " (backward)"


def _module(training: TrainingRun, batch: Batch, step: int) -> str:
    """The first module of the model, in the order of its layers, whose output is not finite."""
    model, mesh = training.model, training.mesh
    order = list(dict.fromkeys(_layer(path) for path in model.layouts))
    seen: dict[int, str] = {}  # layer -> its innermost module that was first

    def hook(name: str) -> Any:
        place = order.index(_layer(name)) if _layer(name) in order else len(order)

        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                if place not in seen and not bool(output.detach().isfinite().all()):
                    seen[place] = name

        return look

    key = counter_key(training.plan.seed, "dropout", step)
    share, count = training.share_of(batch, key), training.objective.counts(batch, mesh)[0]
    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.stack.named_modules():
            if name:
                handle = module.register_forward_hook(hook(name))
                hooks.callback(handle.remove)
        loss = training.objective.loss(training, share, count)
        model.pipeline.evaluate(share.inputs, lambda x, m: loss(x, m).total, share.contexts)
    first = min(seen.items()) if seen else None
    all_ranks = [each for each in gather_objects(first, mesh.world) if each]
    return min(map(tuple, all_ranks))[1] if all_ranks else ""


def _layer(path: str) -> str:
    """``layers.3`` of ``layers.3.mlp.down.weight``."""
    parts = path.split(".")
    return ".".join(parts[: 2 if len(parts) > 1 and parts[1].isdigit() else 1])
