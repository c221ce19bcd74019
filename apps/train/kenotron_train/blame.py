"""What is written down of a step whose loss or gradient is not finite, so that it can be replayed.

Shapes: T = B * S rows of a micro-batch.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_data import Batch, Cursor
from kenotron_dist import Mesh, gather_objects
from kenotron_dist.rng import counter_key
from kenotron_optim import NonFinite
from kenotron_train.assemble import Training
from kenotron_train.step import contexts_of, global_count, loss_fn

FOLDER = "nonfinite"
"""Folder of the records, in ``checkpoints_path``."""


@dataclass(frozen=True)
class Blame:
    """What a record says; the same on every rank."""

    step: int
    cursor: Cursor
    """Place in the data where the batch begins."""
    samples: list[int]
    """Numbers of the global batch's samples, as its data set counts them, sorted."""
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
            "samples": self.samples,
        }

    def write(self, folder: Path, mesh: Mesh) -> Path:
        """Write the record below a run folder, on the first rank; its path."""
        path = folder / FOLDER / f"step-{self.step}.json"
        if mesh.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
            fresh.replace(path)
        return path


def blame(training: Training, batch: Batch, step: int, cursor: Cursor, found: NonFinite) -> Blame:
    """Look for the cause of a step that is not finite. Parameters must be as they were before it.

    Collective over the mesh: the batch goes through the model once more.
    """
    return Blame(
        step,
        cursor,
        samples_of(batch, training.mesh),
        _module(training, batch, step) or _owner(found),
        found,
    )


def samples_of(batch: Batch, mesh: Mesh) -> list[int]:
    """Numbers of the global batch's samples, sorted; padded rows have none. Collective over dp."""
    own = batch.samples_MB.flatten().tolist()
    return sorted(each for rank in gather_objects(own, mesh["dp"]) for each in rank if each >= 0)


def _owner(found: NonFinite) -> str:
    """The module of the parameter that is named."""
    if found.name is None:
        return "loss"
    return found.name.rpartition(".")[0] + " (backward)"


def _module(training: Training, batch: Batch, step: int) -> str:
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

    key = counter_key(training.config.general.seed, "dropout", step)
    inputs = [micro.tokens_BS.flatten() for micro in batch]
    count = global_count(batch, mesh, step)
    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.stack.named_modules():
            if name:
                handle = module.register_forward_hook(hook(name))
                hooks.callback(handle.remove)
        model.pipeline.evaluate(inputs, loss_fn(training, batch, count), contexts_of(batch, key))
    first = min(seen.items()) if seen else None
    all_ranks = [each for each in gather_objects(first, mesh.world) if each]
    return min(map(tuple, all_ranks))[1] if all_ranks else ""


def _layer(path: str) -> str:
    """``layers.3`` of ``layers.3.mlp.down.weight``."""
    parts = path.split(".")
    return ".".join(parts[: 2 if len(parts) > 1 and parts[1].isdigit() else 1])
