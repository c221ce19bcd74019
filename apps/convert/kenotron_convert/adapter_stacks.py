"""Adapters of stacks of experts, which ``target_parameters`` of peft names, for their merge.

Shapes: E experts, I input and O output features, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenotron_ckpt import SafetensorsFolder
from kenotron_models import transformers_tensors
from kenotron_models.adapters import linear_parts, peft_module, rank_and_scale, stack_factors
from kenotron_models.families import TransformersConfig
from kenotron_models.hf import PEFT_PREFIX, TensorPart

_STACKS = re.compile(rf"{re.escape(PEFT_PREFIX)}(.*\.)?experts(\.base_layer)*")


class StackPlan(NamedTuple):
    """Sum that an adapter adds to a tensor of a file."""

    module: str
    """Begins the names of the adapter's tensors."""
    scale: float
    part: TensorPart
    """The tensor, as a part of the stack."""
    experts: int
    turned: bool
    """True for a stack (E, I, O)."""

    def added_to(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return a weight and what its adapter adds, summed in fp32.

        Args:
            weight: the tensor of the file, with the elements of ``part`` in their order.
            a: A of all experts (r * E, I).
            b: B of all experts (O, r * E).
        """
        experts, *box = (
            slice(first, first + size)
            for first, size in zip(self.part.start, self.part.block, strict=True)
        )
        ours, theirs = (x[experts] for x in stack_factors(a.float(), b.float(), self.experts))
        added = torch.bmm(theirs, ours)
        added = (added.mT if self.turned else added)[:, box[0], box[1]].reshape(weight.shape)
        return (weight.float() + self.scale * added).to(weight.dtype)


def is_stack(module: str) -> bool:
    """Return True for a module of peft around experts."""
    return _STACKS.fullmatch(module) is not None


def stack_plans(
    own: SafetensorsFolder, keys: Mapping[str, Any], base: Path, modules: set[str]
) -> dict[str, StackPlan]:
    """Return the adapters of experts by names of the tensors in files.

    Args:
        own: folder of the adapter.
        keys: its adapter_config.json.
        base: the model's folder.
        modules: of peft, around experts, that have adapters.

    Raises:
        ValueError: an adapter is of no stack of the model, or of another shape; transformers,
            which knows how files are made of stacks, is not installed.
    """
    if not modules:
        return {}
    config, plans = TransformersConfig(path=str(base)), dict[str, StackPlan]()
    try:
        wholes = transformers_tensors(config.decoder)
    except ImportError as error:
        raise ValueError(str(error)) from error
    known = {path: each for path, each in linear_parts(config).items() if each.stacked}
    stacks = {each.parts[0]: path for path, each in known.items()}
    targets = keys.get("target_parameters") or ()
    meant = [p for p in stacks if any(f".{p.name}".endswith(f".{each}") for each in targets)]
    left = set(modules)
    for part in meant:
        path, module = stacks[part], peft_module(part, meant)
        rank, scale = rank_and_scale(keys, part.name)
        experts, rows, width = part.shape
        due = {"A": (rank * experts, width), "B": (rows, rank * experts)}
        for kind, shape in due.items():
            name = f"{module}.lora_{kind}.weight"
            if name not in own.tensors or own.tensors[name].shape != shape:
                found = own.tensors[name].shape if name in own.tensors else "missing"
                raise ValueError(f"{name} is {found}, and it must be {shape} for {part.name}")
        left.discard(module)
        for piece in wholes[path].parts:
            plans[piece.name] = StackPlan(module, scale, piece, experts, known[path].turned)
    if left:
        raise ValueError(
            f"{min(left)} is an adapter of experts that target_parameters does not name, or of "
            "another model"
        )
    return plans
