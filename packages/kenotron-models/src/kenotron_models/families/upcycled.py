"""From the config of a dense model to that of the same model with copies of its feed-forward."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from kenotron_models.families.llama import LlamaConfig
from kenotron_models.families.mistral import MistralConfig
from kenotron_models.families.mixtral import MixtralConfig
from kenotron_models.families.moe_config import MoEConfig
from kenotron_models.families.qwen2 import Qwen2Config
from kenotron_models.families.qwen3 import Qwen3Config
from kenotron_models.families.qwen3_moe import Qwen3MoEConfig
from kenotron_models.families.rope_keys import LlamaKeys
from kenotron_models.family import FamilyConfig
from kenotron_models.shapes import decoder_layouts

_MODULES = {
    "mlp_norm": "experts_norm",
    "mlp.gate_up": "experts.gate_up",
    "mlp.down": "experts.down",
}
"""Modules of a dense block, and what they become."""


def upcycled_name(name: str) -> tuple[str, bool]:
    """Return what a tensor of the dense model becomes, and whether each expert has a copy of it."""
    owner, _, kind = name.rpartition(".")
    folder, _, rest = owner.partition(".")
    number, _, module = rest.partition(".")
    if folder != "layers" or module not in _MODULES:
        return name, False
    return f"layers.{number}.{_MODULES[module]}.{kind}", module != "mlp_norm"


def router_shapes(config: FamilyConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of all routers, which no dense model has: (E, D) by name."""
    found = decoder_layouts(config)
    return {name: layout.shape for name, layout in found.items() if layout.role == "router"}


def upcycled_config(config: FamilyConfig, experts: int, top_k: int) -> FamilyConfig:
    """Return the config of a model whose feed-forwards are ``experts`` copies of the dense one.

    The weights of a token's experts add up to 1, so copies compute what one of them does
    (Komatsuzaki et al., arXiv 2212.05055). A Llama or Mistral becomes a Mixtral, a Qwen2 one with
    ``moe_config``, a Qwen3 a Qwen3 with experts.

    Args:
        config: a dense model of one of these families.
        experts: experts of a layer.
        top_k: experts that each token is sent to.

    Raises:
        ValueError: another family, one that has experts, or a Qwen3 with a window; sizes that do
            not fit.
    """
    if isinstance(config, LlamaConfig | MistralConfig):
        own = _shared(config)
        own["sliding_window_size"] = getattr(config, "sliding_window_size", None)
        return MixtralConfig(**own, num_local_experts=experts, num_experts_per_tok=top_k)
    if isinstance(config, Qwen2Config) and config.moe_config is None:
        section = MoEConfig(
            num_experts=experts,
            top_k=top_k,
            moe_intermediate_size=config.intermediate_size,
            norm_topk_prob=True,
        )
        return replace(config, moe_config=section)
    if isinstance(config, Qwen3Config) and config.sliding_window_size is None:
        return Qwen3MoEConfig(
            **_shared(config),
            num_experts=experts,
            num_experts_per_tok=top_k,
            moe_intermediate_size=config.intermediate_size,
        )
    name = type(config).__name__.removesuffix("Config")
    raise ValueError(
        f"a {name} like this has no copies with experts: give a dense Llama, Mistral or Qwen2, or "
        "a Qwen3 without sliding_window_size"
    )


def _shared(config: LlamaKeys) -> dict[str, Any]:
    """The keys that all these families have."""
    return {each.name: getattr(config, each.name) for each in fields(LlamaKeys)}
