"""What families with experts share: layers in Hugging Face's keys, checks, small copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kenotron_models.experts import ExpertsSpec
from kenotron_models.families.fields import at_least
from kenotron_models.hf_tensors import LLAMA_NAMES, Fused, Names, Stacked
from kenotron_models.spec import DecoderSpec

QWEN_EXPERTS: Names = {
    **LLAMA_NAMES,
    "experts_norm": Fused("post_attention_layernorm"),
    "experts.router": Fused("mlp.gate"),
    "experts.gate_up": Stacked("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "experts.down": Stacked("mlp.experts.{e}.down_proj"),
    "experts.shared.gate_up": Fused("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "experts.shared.down": Fused("mlp.shared_expert.down_proj"),
    "experts.shared_gate": Fused("mlp.shared_expert_gate"),
}
"""Names of Qwen2-MoE and Qwen3-MoE."""
SMALL_EXPERTS = 8
"""Most experts of a layer of a small copy."""


def expert_problems(names: Mapping[str, int], experts: str, top_k: str) -> list[str]:
    """Name sizes below 1, and more experts of a token than there are.

    Args:
        names: sizes by key.
        experts: key of the number of experts.
        top_k: key of the experts of a token.
    """
    found = at_least(1, names)
    if names[top_k] > names[experts]:
        found.append(
            f"{top_k}: {names[top_k]} was given; it must not be above {experts} ({names[experts]})"
        )
    return found


def loss_problems(**weights: float) -> list[str]:
    """Name weights of losses that are negative or not finite."""
    return [
        f"{name}: {value} was given; it must be finite and not negative"
        for name, value in weights.items()
        if not 0 <= value < float("inf")
    ]


def small_experts(experts: int, top_k: int, ep: int) -> tuple[int, int]:
    """Return experts and experts of a token of a small copy: about 8, a multiple of ep."""
    few = min(experts, max(SMALL_EXPERTS // ep, 1) * ep)
    return few, min(top_k, few)


def sparse_layers(layers: int, step: int, without: Collection[int]) -> list[int]:
    """Return the layers with experts: every ``step``-th one, but for those ``without``."""
    return [i for i in range(layers) if (i + 1) % step == 0 and i not in without]


def sparse_from_hf(values: Mapping[str, Any]) -> list[int]:
    """Return the layers with experts of Qwen's keys. Raises ValueError, naming the key."""
    step, without = values["decoder_sparse_step"], values.get("mlp_only_layers") or []
    if type(step) is not int or step < 1:
        raise ValueError(f"decoder_sparse_step: {step!r} was given; it must be at least 1")
    found = sparse_layers(values["num_hidden_layers"], step, without)
    if not found:
        raise ValueError(
            "decoder_sparse_step, mlp_only_layers: no layer has experts; such a model is of the "
            "family without"
        )
    return found


def only_experts(spec: DecoderSpec, found: Mapping[int, ExpertsSpec]) -> ExpertsSpec:
    """Return the experts of all layers that have some. Raises ValueError where two differ."""
    kinds = {*found.values()}
    if len(kinds) > 1:
        raise ValueError(f"{spec.num_hidden_layers} layers have {len(kinds)} kinds of experts")
    return kinds.pop()
