"""Names, shapes and layouts of experts in Nanotron's files: in a Qwen2, and in Kénotron's LlaMoE.

Shapes: E experts, F features of an expert, h hidden. Here the experts' matrices are stacks
(E, 2 F, h), gate above up, and (E, h, F); LlaMoE's have no gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

NEW_KEYS = {
    "norm_topk_prob": False,
    "router_z_loss_coef": 0.0,
    "router_bias_rate": 0.0,
    "router_aux_loss_type": "sample",
    "router_jitter_noise": 0.0,
    "expert_capacity_factor": None,
}
"""Keys of ``moe_config`` that Nanotron has not, and what it computes."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _each_transposed(stack: Tensor) -> Tensor:
    """(E, a, b) -> (E, b, a)."""
    return stack.transpose(1, 2)


@dataclass(frozen=True)
class Due:
    """A tensor that a checkpoint must have."""

    name: str
    """Name here."""
    shape: tuple[int, ...]
    """Shape there."""
    change: Callable[[Tensor], Tensor] = _same
    """Ours from theirs; so of Adam's state."""

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape here."""
        return tuple(self.change(torch.empty(self.shape, device="meta")).shape)

    def within(self, folder: str) -> Due:
        """Return the same tensor with a name below ``folder``."""
        return replace(self, name=f"{folder}.{self.name}")


def whole_numbers(values: Mapping[str, Any], names: Sequence[str], where: str) -> list[int]:
    """Return sizes by name. Raises ValueError, naming those that are missing or no numbers."""
    missing = [name for name in names if type(values.get(name)) is not int]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} must be there, as whole numbers")
    return [values[name] for name in names]


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a Qwen2 has layers with experts."""
    section = config.get("moe_config")
    return isinstance(section, Mapping) and bool(section.get("layers", [-1]))


def section_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``moe_config`` with the keys that we have and Nanotron has not; all layers are -1."""
    section: dict[str, Any] = {**NEW_KEYS, "layers": [-1], **config["moe_config"]}
    if sorted(section["layers"]) == list(range(config["num_hidden_layers"])):
        section["layers"] = [-1]
    return section


def _check_choice(
    config: Mapping[str, Any], section: Mapping[str, Any], experts: int, where: str
) -> None:
    """Raise ValueError where ``layers`` or ``top_k`` name what the model has not."""
    layers, top_k = section.get("layers", [-1]), section.get("top_k", 1)
    known = range(config["num_hidden_layers"])
    if layers != [-1] and not (
        isinstance(layers, list)
        and all(type(i) is int and i in known for i in layers)
        and len({*layers}) == len(layers)
    ):
        raise ValueError(
            f"{where}: moe_config.layers is {layers!r}; it must be [-1], or numbers from 0 to "
            f"{len(known) - 1}, each once"
        )
    if type(top_k) is not int or not 1 <= top_k <= experts:
        raise ValueError(
            f"{where}: moe_config.top_k is {top_k!r}; it must be from 1 to num_experts ({experts})"
        )


def qwen2_tensors(config: Mapping[str, Any], where: str) -> dict[str, Due]:
    """Return the tensors of a Qwen2's layer with experts by their name in the layer.

    Args:
        config: the values of ``model_config.json``.
        where: what errors begin with.

    Raises:
        ValueError: a size is missing, or layers or top_k are out of range.
    """
    section, (hidden,) = config["moe_config"], whole_numbers(config, ("hidden_size",), where)
    names = ("num_experts", "moe_intermediate_size")
    experts, features = whole_numbers(section, names, f"{where}: moe_config")
    _check_choice(config, section, experts, where)
    found = {
        "post_attention_layernorm.weight": Due("experts_norm.weight", (hidden,)),
        "mlp.router.weight": Due("experts.router.weight", (experts, hidden)),
        "mlp.experts.merged_gate_up_proj": Due(
            "experts.gate_up.weight", (experts, hidden, 2 * features), _each_transposed
        ),
        "mlp.experts.merged_down_proj": Due(
            "experts.down.weight", (experts, features, hidden), _each_transposed
        ),
    }
    if section.get("enable_shared_expert"):
        name = "shared_expert_intermediate_size"
        (shared,) = whole_numbers(section, (name,), f"{where}: moe_config")
        found |= {
            "mlp.shared_expert.gate_up_proj.weight": Due(
                "experts.shared.gate_up.weight", (2 * shared, hidden)
            ),
            "mlp.shared_expert.down_proj.weight": Due(
                "experts.shared.down.weight", (hidden, shared)
            ),
            "mlp.shared_expert_gate.weight": Due("experts.shared_gate.weight", (1, hidden)),
        }
    return found


def llamoe_tensors(config: Mapping[str, Any], where: str) -> dict[str, Due]:
    """Return the tensors of a LlaMoE's layer after its attention by their name in the layer.

    The second matrices are transposed, one below the other. A single expert has ordinary linears.

    Args:
        config: the values of ``model_config.json``.
        where: what errors begin with.

    Raises:
        ValueError: a size is missing.
    """
    sizes = ("hidden_size", "intermediate_size", "moe_num_experts")
    hidden, features, experts = whole_numbers(config, sizes, where)
    rows = (experts * features, hidden)

    def stacked(tensor: Tensor) -> Tensor:
        """(E F, h) -> (E, F, h)."""
        return tensor.unflatten(0, (experts, features))

    def stacked_down(tensor: Tensor) -> Tensor:
        """(E F, h), or (h, F) of one expert -> (E, h, F)."""
        return tensor[None] if experts == 1 else _each_transposed(stacked(tensor))

    down = (hidden, features) if experts == 1 else rows
    return {
        "post_attention_layernorm.weight": Due("experts_norm.weight", (hidden,)),
        "block_sparse_moe.gate.layer.weight": Due("experts.router.weight", (experts, hidden)),
        "block_sparse_moe.experts.mlp.w1.module.weight": Due("experts.up.weight", rows, stacked),
        "block_sparse_moe.experts.mlp.w2.module.weight": Due(
            "experts.down.weight", down, stacked_down
        ),
    }
