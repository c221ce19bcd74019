"""Settings of an optimizer whose bits are not shown to be the same on every layout."""

from __future__ import annotations

from kenotron_optim.config import OptimizerConfig
from kenotron_optim.rule_config import SGDConfig

ADVICE = {
    "shard_ranks": (None, "sums over blocks of ranks are in no tree of samples: leave it out"),
    "state_dtype": ("float32", "states are rounded at random: set it to float32"),
    "offload": (False, "updates on the host are not shown to have these bits: set it to false"),
    "accumulate_grad_in_fp32": (True, "sums are fp32: set it to true"),
}
"""By field: the value that is shown to be right, and what is said of others."""


def unordered_settings(config: OptimizerConfig) -> list[str]:
    """Name settings that a reproducible training (``SampleGradients``) must not have.

    Returns:
        One line for each: field, value given, reason and fix.
    """
    found = [
        f"{name}: {getattr(config, name)} was given; {advice}"
        for name, (right, advice) in ADVICE.items()
        if getattr(config, name) != right
    ]
    rule = config.optimizer_factory
    if not isinstance(rule, SGDConfig) and rule.torch_adam_is_fused:
        found.append(
            "optimizer_factory.torch_adam_is_fused: true was given; the fused kernel rounds the "
            "last elements of a slice differently: set it to false"
        )
    return found
