"""Adapters of linear layers.

LoRA: Hu et al., arXiv 2106.09685; DoRA: Liu et al., arXiv 2402.09353.

A layer here may be several of Hugging Face's, one below the other (queries, keys and values): each
of these has an adapter of its own, as the peft package gives it.

Shapes: I input and O output features, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

from torch import nn

from kenotron_dist.init import Constant, Initializer, Uniform
from kenotron_dist.placement import TensorLayout
from kenotron_models.decoder import LayerStack, build_decoder
from kenotron_models.hf import hf_tensors
from kenotron_models.hf_tensors import TensorPart, Whole
from kenotron_models.peft_config import foreign_keys
from kenotron_models.registry import AnyConfig, family_of
from kenotron_models.shapes import ONE
from kenotron_models.transformers_names import transformers_tensors
from kenotron_models.transformers_spec import TransformersSpec
from kenotron_tp import ColumnParallelLinear, RowParallelLinear

LINEAR = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
"""Layers that may have an adapter."""
ALL = "all"
"""Target that stands for all linear layers of blocks."""
PEFT = "base_model.model."
"""Begins the names of tensors that peft writes."""
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
    """Weights (O, I) of ours, and the rows of each that have an adapter of their own."""

    @property
    def scale(self) -> float:
        """Factor of ``B A``."""
        return self.alpha / self.rank

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
        modules = sorted(module_of(part) for own in self.weights.values() for part in own)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_dora": self.kind == "dora",
            "target_modules": modules,
            **WRITTEN,
        }

    def tensors(self) -> dict[str, Whole]:
        """Return the tensors of the adapters by logical name, and those that peft makes of them."""
        found = {}
        for weight, parts in self.weights.items():
            for part in parts:
                ours, theirs = adapter_name(weight, part), PEFT + module_of(part)
                rows, width = part.shape
                made: dict[str, tuple[str, tuple[int, ...]]] = {
                    "a.weight": ("lora_A.weight", (self.rank, width)),
                    "b.weight": ("lora_B.weight", (rows, self.rank)),
                }
                if self.kind == "dora":
                    made["m"] = ("lora_magnitude_vector", (rows,))
                for own, (name, shape) in made.items():
                    turned = () if own == "a.weight" else (part.head_dim, part.turned, part.paired)
                    piece = TensorPart(f"{theirs}.{name}", shape, (0,) * len(shape), *turned)
                    found[f"{ours}.{own}"] = Whole(shape, (piece,))
        return found


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
    return f"{weight.removesuffix('.weight')}.lora.{key_of(part)}"


def key_of(part: TensorPart) -> str:
    """Return the last word of the name of Hugging Face's module: ``q_proj``."""
    return module_of(part).rpartition(".")[2]


def module_of(part: TensorPart) -> str:
    """Return the name of Hugging Face's module: ``model.layers.0.self_attn.q_proj``."""
    return part.name.removesuffix(".weight")


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


def linear_parts(config: AnyConfig) -> dict[str, tuple[TensorPart, ...]]:
    """Return all weights (O, I) that may have adapters, by name, and the modules of each.

    They are those of linear layers inside blocks. A family without names in Hugging Face's format
    has its own. Raises ImportError or ValueError for a model that cannot be built.
    """
    spec = config.decoder
    stack, known = LayerStack(build_decoder(spec, ONE)), _their_tensors(config)
    found: dict[str, tuple[TensorPart, ...]] = {}
    for name, module in stack.named_modules():
        inside = isinstance(module, LINEAR) and re.match(r"(layers|model)\.", name)
        if not inside or getattr(module, "roles", {}).get("weight") == "output":
            continue
        path, shape = f"{name}.weight", (*module.weight.shape,)
        parts = known[path].parts if path in known else ()
        if not parts or any(len(part.shape) != 2 for part in parts):
            parts = (TensorPart(path, shape, (0, 0)),)
        found[path] = parts
    return found


def _their_tensors(config: AnyConfig) -> Mapping[str, Whole]:
    if isinstance(config.decoder, TransformersSpec):
        return transformers_tensors(config.decoder)
    return {} if family_of(config).hf is None else hf_tensors(config)


def targeted(
    parts: Mapping[str, tuple[TensorPart, ...]], targets: Sequence[str]
) -> dict[str, tuple[TensorPart, ...]]:
    """Return those of ``linear_parts`` that are targets.

    Args:
        parts: of the model.
        targets: ends of names at a dot (``q_proj``, ``mlp.up_proj``) or patterns of them, of
            modules of Hugging Face's or of ours; ``all``: every one.

    Raises:
        ValueError: a line for each target that is no pattern, or names nothing.
    """
    problems, chosen = [], dict[str, tuple[TensorPart, ...]]()
    hits = set[tuple[str, str]]()
    for target in targets:
        try:
            wanted = re.compile("" if target == ALL else rf"(^|.*\.)({target})$")
        except re.error as error:
            problems.append(f"{target!r} is no pattern ({error})")
            continue
        new = {
            (weight, part.name)
            for weight, own in parts.items()
            for part in own
            if wanted.match(module_of(part)) or wanted.match(weight.removesuffix(".weight"))
        }
        if not new:
            words = sorted({key_of(part) for own in parts.values() for part in own})
            near = get_close_matches(target.rpartition(".")[2], words, n=1, cutoff=0.5)
            hint = f"; is it {near[0]}?" if near else ""
            there = (
                ", ".join(words) or "none that adapters know (Conv1D of transformers is not one)"
            )
            problems.append(f"{target!r} is no linear layer: there are {there}{hint}")
        hits |= new
    if problems:
        raise ValueError("\n".join(problems))
    for weight, own in parts.items():
        if kept := tuple(part for part in own if (weight, part.name) in hits):
            chosen[weight] = kept
    return chosen
