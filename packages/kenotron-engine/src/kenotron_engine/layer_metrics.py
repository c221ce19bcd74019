"""Statistics of every layer at an interval: parameters, gradients and what layers put out.

N logical tensors of the whole model, F numbers of each (``kenotron_dist.statistics``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.statistics import (
    merge,
    moments,
    no_moments,
    statistics_of,
    sum_moments,
    tensor_moments,
)
from kenotron_engine.assembly import Model
from kenotron_engine.training import Training
from kenotron_models import Context, component_of, components, reported_name
from kenotron_optim import Slices
from kenotron_tp import TPMode


class LayerMetrics:
    """Looks at the layers in one step; in other steps there is none of it.

    ``during()`` is around the step, ``look`` is called in it with the whole gradient before
    clipping, and ``collect`` gives the figures. Parameters are those that made the gradient.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._found: dict[str, float] = {}
        spec = training.plan.spec
        layers = [f"layers.{i}" for i in range(spec.num_hidden_layers)]
        self._layers = ["embedding", *layers, "norm"]
        self._rows = no_moments(training.mesh.device).repeat(len(self._layers), 1)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Watch what layers put out; programs of torch.compile cannot be watched."""
        training, handles = self._training, []
        if not training.plan.compile:
            for place, name in enumerate(self._layers):
                layer = _submodule(training.model, name)
                if layer is not None:
                    handles.append(layer.register_forward_hook(partial(self._see, place)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def look(self, gradient: Slices) -> None:
        """Take the statistics of parameters and gradient. Collective over the mesh."""
        mesh, model, grads = self._training.mesh, self._training.model, self._training.grads
        names = sorted({layout.name for layout in model.layouts.values()})
        paths = {layout.name: path for path, layout in sorted(model.layouts.items())[::-1]}
        records = self._training.records()
        held = {name: records[name][0] for name in sorted(records)}
        layouts = {name: layout for name, (_, layout) in records.items()}
        rows = tensor_moments(held, layouts, names, mesh).cpu()
        owned = {name: grads.owned_layout(name) for name in gradient}
        gradients = tensor_moments(gradient, owned, grads.names, mesh).cpu()
        for name, row in zip(names, rows, strict=True):
            self._add(reported_name(paths[name]), row)
        for name, row in zip(grads.names, gradients, strict=True):
            self._add(f"{reported_name(paths[name])}/grad", row)
        self._add_components([paths[name] for name in names], rows)

    def collect(self) -> dict[str, float]:
        """All figures by name, the same on every rank. Collective over the mesh."""
        if not self._training.plan.compile:
            for name, row in zip(
                self._layers, sum_moments(self._rows, self._training.mesh).cpu(), strict=True
            ):
                self._add(f"{_activation_name(name)}/activation", row)
        return self._found

    def _see(self, place: int, _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Add a layer's output (T, D), or (T/t, D), to its row; each element on one rank."""
        output = output[0] if isinstance(output, tuple) else output
        own = own_tokens(self._training.mesh, self._training.plan.mode, inputs[1], output)
        self._rows[place] = merge(self._rows[place], moments(own))

    def _add(self, name: str, row: Tensor) -> None:
        for key, value in asdict(statistics_of(row.tolist())).items():
            self._found[f"{name}/{key}"] = value

    def _add_components(self, paths: list[str], rows: Tensor) -> None:
        """Add the weights (N, F) of all blocks together: by component, and all of them."""
        spec, layouts = self._training.plan.spec, self._training.model.layouts
        parts = [component_of(path, layouts[path].role, spec) for path in paths]
        for component in components(spec):
            own = [row for row, part in zip(rows, parts, strict=True) if part == component]
            self._add(f"global_{component}", reduce(merge, own, no_moments()))
        every = [row for row, part in zip(rows, parts, strict=True) if part is not None]
        self._add("global_global", reduce(merge, every, no_moments()))


def own_tokens(mesh: Mesh, mode: TPMode, context: Context, output: Tensor) -> Tensor:
    """The rows of a layer's output (rows, ...) that this rank counts.

    They are no padding, and nothing that others count.
    """
    tp = mesh["tp"]
    if not mode.sequence_parallel and tp.rank:
        return output[:0]
    first = tp.rank * output.shape[0] if mode.sequence_parallel else 0
    if context.cut is None:
        return output[: max(0, context.tokens - first)]
    real = context.cut.real_tokens(output.device) - first
    return output[real[(real >= 0) & (real < output.shape[0])]]


def _submodule(model: Model, name: str) -> nn.Module | None:
    """A layer of this stage by its global name."""
    try:
        return torch.nn.Module.get_submodule(model.stack, name)
    except AttributeError:
        return None


def _activation_name(name: str) -> str:
    """The reported name of a layer."""
    return name.replace("layers.", "layer_") if "." in name else reported_name(f"{name}.weight")
