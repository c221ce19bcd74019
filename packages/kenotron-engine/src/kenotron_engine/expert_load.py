"""Spread of a step's tokens over experts, and the choice biases that follow from it.

L layers with experts in the whole model, E experts of a layer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kenotron_dist import all_reduce
from kenotron_models import TransformersLayer, TransformersSpec, expert_layers
from kenotron_models.layers import Experts, ExpertsSpec, Router

if TYPE_CHECKING:
    from kenotron_engine.training import Training


def forget_loads(training: Training) -> None:
    """Begin to count the loads of this stage's experts at 0."""
    for router in _routers(training).values():
        router.take_load()
        router.take_drops()
    _own_balance(training)


def balance_experts(training: Training, blocked: Tensor) -> list[Tensor]:
    """Move the choice biases of this stage's routers, and return what is known of all layers.

    The loads are those of the global batch: they depend neither on micro-batches nor on the layout.
    Collective over the mesh; nothing happens in a model without experts.

    Args:
        training: after the backward of a global batch.
        blocked: whether nothing may change in this step, a bool scalar.

    Returns:
        Loads (L, E + 1), whose last column counts dropped choices, and the ranges of biases
        (L, 2), fp64, the same on every rank. Of a model of transformers its balance loss times
        tokens, and these (2,). Or nothing.
    """
    layers = experts_by_layer(training)
    if not layers:
        mesh = training.mesh
        return [all_reduce(all_reduce(x, mesh["dp"]), mesh["pp"]) for x in _own_balance(training)]
    mesh, routers = training.mesh, _routers(training)
    width = max(spec.router.experts for spec in layers.values())
    loads = torch.zeros(len(layers), width + 1, dtype=torch.float64, device=mesh.device)
    ranges = torch.zeros(len(layers), 2, dtype=torch.float64, device=mesh.device)
    for row, number in enumerate(layers):
        if number in routers:
            own = routers[number].take_load()
            loads[row, : len(own)] = own
            loads[row, -1] = routers[number].take_drops()
    loads = all_reduce(loads, mesh["dp", "cp", "tp"])
    for row, number in enumerate(layers):
        if number in routers:
            router = routers[number]
            router.move_bias(loads[row, : router.spec.experts], blocked)
            if router.choice_bias is not None:
                ranges[row] = torch.stack(router.choice_bias.aminmax())
    return [all_reduce(each, mesh["pp"]) for each in (loads, ranges)]


def expert_figures(training: Training, read: list[list[float]]) -> dict[str, Any]:
    """Return the figures of all layers with experts, from what ``balance_experts`` returned.

    Args:
        training: that of the step.
        read: loads and ranges of biases on the host, flattened; or nothing.

    Returns:
        Under "experts" by layer (``layer_<number from 0>``):
        max_over_mean: choices of the most chosen expert over the mean, 1 where all have as many;
        unused: experts that no token chose;
        entropy: of the shares over that of equal ones, from 0 (one expert has all) to 1;
        drops: choices that were dropped beyond the capacity, where there is one;
        bias_min, bias_max: the choice biases after the update, where there are some.
        Of a model of transformers "balance_loss": its ``aux_loss``, a mean over micro-batches.
    """
    layers = experts_by_layer(training)
    if not layers:
        return {"balance_loss": read[0][0] / max(read[0][1], 1)} if read else {}
    loads, ranges = read
    width, found = len(loads) // len(layers), {}
    for row, (number, spec) in enumerate(layers.items()):
        figures = _figures(loads[row * width :][: spec.router.experts])
        if spec.capacity_factor is not None:
            figures["drops"] = int(loads[(row + 1) * width - 1])
        if spec.router.choice_bias:
            figures["bias_min"], figures["bias_max"] = ranges[2 * row : 2 * row + 2]
        found[f"layer_{number}"] = figures
    return {"experts": found}


def experts_by_layer(training: Training) -> dict[int, ExpertsSpec]:
    """Return the experts of the whole model by layer, from 0.

    Those of the module that predicts the token after the next come after the last layer.
    """
    spec = training.plan.spec
    found, depth = expert_layers(spec), spec.num_hidden_layers
    return found | ({depth: found[depth - 1]} if spec.mtp_weight and depth - 1 in found else {})


def _routers(training: Training) -> dict[int, Router]:
    """The routers of this stage by layer."""
    modules = training.model.stack.modules()
    return {each.layer: each.router for each in modules if isinstance(each, Experts)}


def _own_balance(training: Training) -> list[Tensor]:
    """Take the balance loss of transformers' layers, summed on this stage: (2,), or nothing."""
    spec, found = training.plan.spec, torch.zeros(2, device=training.mesh.device)
    if not isinstance(spec, TransformersSpec) or not spec.balances:
        return []
    for layer in training.model.stack:
        if isinstance(layer, TransformersLayer) and (own := layer.take_balance()) is not None:
            found += own
    return [found]


def _figures(counts: list[float]) -> dict[str, float]:
    total, number = sum(counts), len(counts)
    shares = [count / total for count in counts] if total else [0.0]
    entropy = -sum(share * math.log(share) for share in shares if share)
    if total:
        entropy = entropy / math.log(number) if number > 1 else 1.0
    return {
        "max_over_mean": max(shares) * number,
        "unused": counts.count(0),
        "entropy": entropy,
    }
