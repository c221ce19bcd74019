"""Bytes of the tensors of a real step that are alive, counted at every operation of torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron_config import Config
from kenotron_data import Cursor
from kenotron_dist import Mesh
from kenotron_engine import training_step
from kenotron_optim import GradAccumulator, SampleGradients
from kenotron_train.assemble import TrainingRun, build_training, data_plan
from kenotron_train.data.stage_dataset import open_corpus, open_loader

TENSORS = torch.Tensor, torch.nn.Parameter


class LiveBytes(TorchDispatchMode):
    """Counts storages from their first use within the mode until they are freed.

    Temporaries that a kernel allocates inside of one operation are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak: dict[int, int] = {}
        self._storages: dict[weakref.ref, int] = {}
        self._resized: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count((args, kwargs, out))
        return out

    def count(self, found: Any) -> None:
        """Count the tensors of a nested structure."""
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
                storage = each.untyped_storage()
                ref = weakref.ref(storage, self._freed)
                if storage.nbytes() and ref not in self._storages:
                    self._storages[ref] = storage.nbytes()
                    self.now += storage.nbytes()
        resized = sum(storage.nbytes() for storage in self._resized)
        self.peak = max(self.peak, self.now + resized)

    def ignore(self, tensors: list[torch.Tensor]) -> None:
        """Leave out what is there before."""
        storages = [each.untyped_storage() for each in tensors]
        self._storages |= {weakref.ref(each, self._freed): 0 for each in storages}

    def watch(self, parameters: list[torch.Tensor]) -> None:
        """Count the memory of parameters as it comes and goes."""
        self.ignore(parameters)
        storages = [each.untyped_storage() for each in parameters]
        self._resized = [*{each._cdata: each for each in storages}.values()]  # tied ones are one

    def _freed(self, ref: weakref.ref) -> None:
        self.now -= self._storages.pop(ref)


def _tensors() -> list[torch.Tensor]:
    """Return all tensors that are alive."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in TENSORS]


def state_bytes_of(training: TrainingRun) -> dict[str, int]:
    """Return the bytes of what a rank keeps between steps, each storage once, by class."""
    grads, seen, found = training.grads, set[int](), dict[str, int]()
    wanted = {key: tensor for key, (tensor, _) in training.optimizer.wanted().items()}
    classes: dict[str, list[torch.Tensor]] = {
        "parameters": [*training.model.stack.parameters(), *grads.frozen.values.values()],
        "gradients": [*grads.buffers, *grads._seconds.values(), *grads.slice_sums],
        "fp32 masters": [each for key, each in wanted.items() if key.startswith("master.")],
        "optimizer": [each for key, each in wanted.items() if not key.startswith("master.")],
    }
    for what, tensors in classes.items():
        storages = [t.untyped_storage() for t in tensors if t.device.type != "meta"]
        new = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in seen}
        seen |= {*new}
        found[what] = sum(new.values())
    return found


def sums_of_samples(grads: GradAccumulator) -> int:
    """Return the bytes of the trees of a reproducible step."""
    trees = getattr(grads, "_trees", {}).values()
    return sum(node.nbytes for tree in trees for node in tree.nodes.values())


def measured_step(mesh: Mesh, config: Config) -> dict[str, int]:
    """Return the bytes of a rank's state by class, and the most that a later step has alive."""
    live = LiveBytes()
    live.ignore(_tensors())
    training, plan = build_training(config, mesh), data_plan(config)
    # A gradient of SampleGradients is a use.
    exact = isinstance(training.grads, SampleGradients)
    name = "receive_use" if exact else "receive_gradient"
    trees, receive = [0], getattr(training.grads, name)

    def received(*given: Any) -> None:
        receive(*given)
        trees.append(sums_of_samples(training.grads))

    with open_loader(plan, mesh, open_corpus(plan, 0), Cursor()) as loader:
        for number in range(1, 3):
            training_step(training, next(loader), number)
        batch = next(loader)
        live.watch([*training.model.stack.parameters()])
        with live:
            live.count(_tensors())
            training_step(training, batch, 3)
        setattr(training.grads, name, received)
        training_step(training, batch, 4)
    return state_bytes_of(training) | {"sums of samples": max(trees), "peak": live.peak}


def measured_steps(_: Mesh, configs: list[Config]) -> list[dict[str, int]]:
    """Return those of several configs of as many ranks, one after the other."""
    return [
        measured_step(Mesh.connect(**c.parallelism.grid, ep=c.parallelism.ep), c) for c in configs
    ]
