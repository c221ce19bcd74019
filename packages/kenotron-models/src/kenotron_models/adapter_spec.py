"""Adapters of linear layers and of stacks of experts.

LoRA: Hu et al., arXiv 2106.09685; DoRA: Liu et al., arXiv 2402.09353.

Shapes: E experts, I input and O output features, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

from kenotron_dist.init import Constant, Initializer, Uniform
from kenotron_dist.placement import TensorLayout
from kenotron_models.adapter_targets import key_of, module_of
from kenotron_models.hf_tensors import TensorPart, Whole
from kenotron_models.peft_config import PEFT_PREFIX, foreign_keys

Kind = Literal["lora", "dora"]
WRITTEN: dict[str, Any] = {
    "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "use_rslora": False, "lora_bias": False, "rank_pattern": {}, "alpha_pattern": {},
    "modules_to_save": None, "layers_to_transform": None, "layer_replication": None,
}  # fmt: skip
"""Keys of peft with one value in all files that are written here."""
ONE_SCALE = ("use_rslora", "rank_pattern", "alpha_pattern")
"""Those of them that adapters of a training have no other value of."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Adapters of a model: ``W x + alpha / rank * B A x``; W does not learn."""

    kind: Kind = "lora"
    """``dora``: rows of ``W + alpha / rank * B A`` are scaled to norms that learn."""
    rank: int
    """r, rows of A and columns of B."""
    alpha: float
    """Its quotient by the rank is the factor of what is added."""
    dropout: float = 0.0
    """Share of the input of A that is dropped in training, by position."""
    weights: Mapping[str, tuple[TensorPart, ...]] = field(hash=False)
    """Weights (O, I) of ours, and the rows of each that have an adapter of their own; a stack of
    experts (E, O, I) has one."""

    @property
    def scale(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / self.rank

    @property
    def stacks(self) -> list[TensorPart]:
        """Stacks of experts that have adapters, in the order of the model."""
        return [part for own in self.weights.values() for part in own if len(part.shape) == 3]

    def of_layer(self, number: int) -> AdapterSpec:
        """Return the adapters of a decoder layer alone, named as those of layer 0."""
        own, first = f"layers.{number}.", "layers.0."
        weights = {
            first + path.removeprefix(own): tuple(
                replace(part, name=re.sub(rf"\.{number}\.", ".0.", part.name, count=1))
                for part in parts
            )
            for path, parts in self.weights.items()
            if path.startswith(own)
        }
        return replace(self, weights=weights)

    def to_peft(self, base: str | None) -> dict[str, Any]:
        """Return the keys of an adapter_config.json.

        ``base``: name or path of the model that the adapters belong to.
        """
        parts, stacks = [p for own in self.weights.values() for p in own], self.stacks
        modules = sorted(module_of(part) for part in parts if part not in stacks)
        named = {"target_parameters": sorted(part.name for part in stacks)} if stacks else {}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_dora": self.kind == "dora",
            "target_modules": modules or None,
            **named,
            **WRITTEN,
        }

    def tensors(self) -> dict[str, Whole]:
        """Return the tensors of the adapters by logical name, and those that peft makes of them."""
        found = {}
        for weight, parts in self.weights.items():
            for part in parts:
                ours, theirs = adapter_name(weight, part), peft_module(part, self.stacks)
                *experts, rows, width = part.shape
                rank = self.rank * prod(experts)  # of all experts, one below the other
                made: dict[str, tuple[str, tuple[int, ...]]] = {
                    "a.weight": ("lora_A.weight", (rank, width)),
                    "b.weight": ("lora_B.weight", (rows, rank)),
                }
                if self.kind == "dora":
                    made["m"] = ("lora_magnitude_vector", (rows,))
                for own, (name, shape) in made.items():
                    turned = () if own == "a.weight" else (part.head_dim, part.turned, part.paired)
                    piece = TensorPart(f"{theirs}.{name}", shape, (0,) * len(shape), *turned)
                    found[f"{ours}.{own}"] = Whole(shape, (piece,))
        return found


def peft_module(part: TensorPart, stacks: Sequence[TensorPart]) -> str:
    """Return the name of peft's module that has the adapter of a linear layer or of a stack.

    ``stacks``: all that have adapters, in the order of the model. Peft wraps the experts once for
    each of theirs: the first is inside the others.
    """
    if len(part.shape) == 2:
        return PEFT_PREFIX + module_of(part)
    module = part.name.rpartition(".")[0]
    own = [each.name for each in stacks if each.name.rpartition(".")[0] == module]
    later = len(own) - 1 - own.index(part.name)
    return PEFT_PREFIX + ".".join([module, *["base_layer"] * later])


def peft_problems(spec: AdapterSpec, values: Mapping[str, Any]) -> list[str]:
    """Name the keys of an adapter_config.json that are not those of adapters; one line each."""
    due = {"r": spec.rank, "lora_alpha": spec.alpha, "use_dora": spec.kind == "dora"}
    due |= {key: WRITTEN[key] for key in ONE_SCALE}
    return foreign_keys(values) + [
        f"{key} is {values.get(key)!r}, and it must be {value!r} for the adapters of the config"
        for key, value in due.items()
        if (values.get(key) or None) != (value or None)
    ]


def adapter_name(weight: str, part: TensorPart) -> str:
    """Return the logical name of an adapter: ``layers.0.attention.qkv.lora.q_proj``."""
    return f"{weight.rpartition('.')[0]}.lora.{key_of(part)}"


def adapter_init(
    draw: Callable[[TensorLayout], Initializer],
) -> Callable[[TensorLayout], Initializer]:
    """Return the first values of a model with adapters: A as peft draws it, B 0, norms 1.

    ``draw``: those of all other tensors.
    """

    def rule(layout: TensorLayout) -> Initializer:
        kind = re.search(r"\.lora\.[^.]+\.(a\.weight|b\.weight|m)$", layout.name)
        if kind is None:
            return draw(layout)
        if kind[1] == "a.weight":
            return Uniform(layout.shape[1] ** -0.5)
        return Constant(float(kind[1] == "m"))

    return rule
