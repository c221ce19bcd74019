"""Faults of layouts that have been seen in the wild, for ranks to measure with."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from kenotron_config import Config
from kenotron_dist import Mesh
from kenotron_dist.placement import Partial, parameter_layouts
from kenotron_engine import ModelPlan, build_model
from kenotron_optim import GradAccumulator, SlicedOptimizer, Slices
from kenotron_train.verify.comparison import measure
from kenotron_train.verify.measured import Measured


def norms_not_reduced() -> Any:
    """Gradients of norms under sequence parallelism stay each rank's own."""

    def layouts(*given: Any) -> dict:
        found = parameter_layouts(*given)
        return {
            path: replace(each, placement=_kept(each.placement)) for path, each in found.items()
        }

    return mock.patch("kenotron_engine.assembly.parameter_layouts", layouts)


def _kept(placement: tuple) -> tuple:
    return tuple(each for each in placement if not isinstance(each, Partial))


def refused_layout() -> Any:
    """Several processes do not begin to train."""

    def check(*_: Any) -> None:
        if torch.distributed.is_initialized():
            raise ValueError("this layout is refused")

    return mock.patch("kenotron_engine.assembly.check_balance", check)


def tie_missed() -> Any:
    """The head's part of the tied gradient is not added to the embedding's."""

    def no_ties(*_: Any) -> list:
        return []

    return mock.patch("kenotron_optim.sync._ties", no_ties)


def local_count() -> Any:
    """Every rank divides its loss by its own targets and the data ranks."""

    def counts(batch: Any, mesh: Mesh) -> torch.Tensor:
        own = (batch.labels_MBS != -100).sum() * mesh["dp"].size
        return torch.stack([own, own])

    return mock.patch("kenotron_engine.objective.global_counts", counts)


def one_gradient_off() -> Any:
    """One parameter's gradient is a thousandth too large."""
    right = GradAccumulator.finish

    def finish(self: GradAccumulator) -> Slices:
        slices = right(self)
        if "layers.1.mlp.down.weight" in slices:
            slices["layers.1.mlp.down.weight"] *= 1.001
        return slices

    return mock.patch.object(GradAccumulator, "finish", finish)


def not_published() -> Any:
    """Updated slices do not reach the other data ranks."""
    return mock.patch.object(SlicedOptimizer, "publish", lambda self: None)


def norm_of_replicas() -> Any:
    """Every replica of an element adds to the norm."""
    return mock.patch("kenotron_optim.clip.norm_weight", lambda *_: 1.0)


def other_weights() -> Any:
    """The second data rank draws other weights."""
    right = build_model

    def build(plan: ModelPlan, mesh: Mesh, *more: Any, **how: Any) -> Any:
        model = right(plan, mesh, *more, **how)
        if mesh["dp"].rank == 1:
            with torch.no_grad():
                next(model.stack.parameters()).mul_(1.5)
        return model

    return mock.patch("kenotron_engine.training.build_model", build)


def nan_gradient() -> Any:
    """One parameter's gradient is nan, and the loss is not."""
    right = GradAccumulator.finish

    def finish(self: GradAccumulator) -> Slices:
        slices = right(self)
        slices["norm.weight"].fill_(torch.nan)
        return slices

    return mock.patch.object(GradAccumulator, "finish", finish)


def crash() -> Any:
    """A rank leaves without a word."""

    def leave(*_: Any) -> None:
        os._exit(9)

    return mock.patch("kenotron_engine.objective.global_counts", leave)


FAULTS: dict[str, Callable[[], Any]] = {
    fault.__name__: fault
    for fault in (
        norms_not_reduced, tie_missed, local_count, one_gradient_off, not_published,
        norm_of_replicas, other_weights, nan_gradient, crash,
    )
}  # fmt: skip


class Planted:
    """``measure`` with a fault in layouts; one process computes as it should. Picklable."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, mesh: Mesh, config: Config, documents: bool, *forced: Any) -> Measured:
        if mesh.world.size == 1:
            return measure(mesh, config, documents, *forced)
        with FAULTS[self.fault]():
            return measure(mesh, config, documents, *forced)
