"""``torch.optim`` optimizers from their config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import adam

from kenotron_dist.placement import TensorLayout
from kenotron_optim.accumulate import GradAccumulator
from kenotron_optim.matrix_exchange import MatrixExchange
from kenotron_optim.muon import MuonMomentum
from kenotron_optim.muon_params import matrix_parts
from kenotron_optim.rule_config import AdamWConfig, MuonConfig, SGDConfig, UpdateRule
from kenotron_optim.torch_groups import MakeOptimizer
from kenotron_optim.torch_rules import SGD, AdamW

Groups = list[dict[str, Any]]


class MuonRule:
    """Muon for the matrices of a model, AdamW for everything else; see ``update_rule``.

    Args:
        config: constants of both.
        layouts: of the whole model.
    """

    def __init__(self, config: MuonConfig, layouts: Mapping[str, TensorLayout]) -> None:
        self.config = config
        self.parts = matrix_parts(layouts, config.adamw_named_params, per_head=config.per_head)
        """Matrices that Muon updates, by logical name."""

    def __call__(self, groups: Groups) -> list[torch.optim.Optimizer]:
        """Make the optimizers over parameter groups."""
        config, found = self.config, list[torch.optim.Optimizer]()
        if matrices := [group for group in groups if group["matrices"]]:
            how = {"momentum": config.momentum, "nesterov": config.nesterov}
            found.append(MuonMomentum(matrices, **how))
        rest = [group for group in groups if not group["matrices"]]
        return [*found, _adamw(rest, config.adamw())] if rest else found


def exchange_of(
    make_optimizer: MakeOptimizer, accumulator: GradAccumulator, *, whole: bool
) -> MatrixExchange | None:
    """Return what updates the matrices of a rule; None for rules that update elements alone."""
    if not isinstance(make_optimizer, MuonRule):
        return None
    steps = make_optimizer.config.ns_steps
    return MatrixExchange(accumulator, make_optimizer.parts, steps, whole=whole)


def update_rule(
    config: UpdateRule, layouts: Mapping[str, TensorLayout] | None = None
) -> MakeOptimizer | MuonRule:
    """Return a function that makes the configured ``torch.optim`` optimizers over groups.

    Their learning rate is 0 until ``SlicedOptimizer.step`` sets that of the step. Tensors are
    updated one by one, or by one fused kernel where the config says so; grouping them (``foreach``)
    would copy all of them once more.

    Args:
        config: the rule and its constants.
        layouts: of the whole model; Muon finds its matrices in them.

    Raises:
        ValueError: Muon without layouts, without matrices, or with a pattern that fits no name.
    """
    if isinstance(config, MuonConfig):
        if layouts is None:
            raise ValueError(
                "muon was given without layouts: pass update_rule(config, parameter_layouts(model, "
                "mesh.axis_sizes))"
            )
        return MuonRule(config, layouts)
    if isinstance(config, SGDConfig):
        return lambda groups: [_sgd(groups, config)]
    return lambda groups: [_adamw(groups, config)]


def _sgd(groups: Groups, config: SGDConfig) -> torch.optim.Optimizer:
    return SGD(
        groups,
        lr=0.0,
        momentum=config.momentum,
        dampening=config.dampening,
        nesterov=config.nesterov,
        foreach=False,
    )


def _on_meta(groups: Groups) -> bool:
    """Return whether there are no values, and torch refuses its fused kernel for them."""
    for parameter in (each for group in groups for each in group["params"] if each.is_meta):
        try:
            adam._device_dtype_check_for_fused(parameter)
        except RuntimeError:
            return True
    return False


def _adamw(groups: Groups, config: AdamWConfig) -> torch.optim.Optimizer:
    return AdamW(
        groups,
        lr=0.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=config.torch_adam_is_fused and not _on_meta(groups),
        foreach=False,
    )
