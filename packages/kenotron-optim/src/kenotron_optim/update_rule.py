"""``torch.optim`` optimizers from their config."""

from __future__ import annotations

from typing import Any

import torch

from kenotron_optim.config import AdamWConfig, MuonConfig, SGDConfig, UpdateRule
from kenotron_optim.sliced_optimizer import MakeOptimizer
from kenotron_optim.torch_rules import SGD, AdamW, Muon

Groups = list[dict[str, Any]]


def update_rule(config: UpdateRule) -> MakeOptimizer:
    """What builds the configured ``torch.optim`` optimizers over parameter groups.

    Their learning rate is 0 until ``SlicedOptimizer.step`` sets that of the step. Tensors are
    updated one by one, or by one fused kernel where the config says so; grouping them (``foreach``)
    would copy all of them once more.
    """

    def make(groups: Groups) -> list[torch.optim.Optimizer]:
        if isinstance(config, SGDConfig):
            return [_sgd(groups, config)]
        if isinstance(config, AdamWConfig):
            return [_adamw(groups, config)]
        matrices = [group for group in groups if group["whole"]]
        rest = [group for group in groups if not group["whole"]]
        found: list[torch.optim.Optimizer] = [_muon(matrices, config)] if matrices else []
        return [*found, _adamw(rest, config.adamw())] if rest else found

    return make


def _sgd(groups: Groups, config: SGDConfig) -> torch.optim.Optimizer:
    return SGD(
        groups,
        lr=0.0,
        momentum=config.momentum,
        dampening=config.dampening,
        nesterov=config.nesterov,
        foreach=False,
    )


def _adamw(groups: Groups, config: AdamWConfig) -> torch.optim.Optimizer:
    return AdamW(
        groups,
        lr=0.0,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=config.torch_adam_is_fused,
        foreach=False,
    )


def _muon(groups: Groups, config: MuonConfig) -> torch.optim.Optimizer:
    return Muon(
        groups,
        lr=0.0,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        adjust_lr_fn="match_rms_adamw",
    )
