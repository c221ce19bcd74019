"""Adapters of stacks of experts' matrices, as ``target_parameters`` of peft.

A of all experts is one matrix (r E, I): r rows of each expert, one below the other. B is (O, r E):
of each rank's column, one for each expert. They are cut as the stack is.

Shapes: E experts, e of this rank, I input and O output features, r rank, R rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import declare_roles
from kenotron_dist.placement import Chunk, Partial, Placement, Placements, Shard
from kenotron_models.adapter_spec import AdapterSpec
from kenotron_models.adapter_targets import is_transposed, key_of, stack_shape
from kenotron_models.hf_tensors import TensorPart
from kenotron_models.stacked_linear import StackedLinear, stacked_linear


def stack_factors(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return A (e, r, I) and B (e, O, r) of each expert, views of those of all.

    Args:
        a: (r e, I).
        b: (O, r e).
        experts: e.
    """
    return a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 0, 1)


class StackAdapter(nn.Module):
    """``scale * B_e A_e`` of each expert of a stack; ``a`` and ``b`` have the weights of all."""

    def __init__(self, a: nn.Linear, b: nn.Linear, experts: int, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.experts, self.scale = a, b, experts, scale

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A (e, r, I) and B (e, O, r) of this rank's experts."""
        a, b = stack_factors(self.a.weight, self.b.weight, self.experts)
        return a, b.contiguous()


class AdaptedStack(nn.Module):
    """Stands in front of the class of a ``StackedLinear``."""

    lora: nn.ModuleDict

    def forward(self, x: Tensor, counts: Tensor, **of_part: int) -> Tensor:
        """Return the rows' products (R, O), and what the adapters add."""
        y: Tensor = super().forward(x, counts, **of_part)
        for adapter in self.lora.children():
            assert isinstance(adapter, StackAdapter)
            a, b = adapter.factors()
            y = y + adapter.scale * stacked_linear(stacked_linear(x, a, counts), b, counts)
        return y


class AdaptedExperts(nn.Module):
    """Stands in front of the class of experts of transformers, whose code reads the sums.

    The sum of a stack and its adapter has the size of the stack, and lives until the backward.
    """

    lora: nn.ModuleDict
    sums: dict[str, Tensor]
    """Stacks with their adapters, while a forward runs."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Call the experts with the sums in the place of their stacks."""
        for name, adapter in self.lora.named_children():
            assert isinstance(adapter, StackAdapter)
            a, b = adapter.factors()
            weight = self._parameters[name]
            assert weight is not None
            pair = (a.transpose(1, 2), b.transpose(1, 2)) if is_transposed(self) else (b, a)
            self.sums[name] = torch.baddbmm(weight, *pair, alpha=adapter.scale)
        try:
            return super().forward(*args, **options)
        finally:
            self.sums.clear()


def attach_stack(module: nn.Module, name: str, spec: AdapterSpec, part: TensorPart) -> None:
    """Give a stack of experts its adapter, and the class that adds it.

    Args:
        module: on meta, cut already, that has the stack.
        name: of the parameter there.
        spec: the adapters.
        part: the stack in transformers, (E, O, I).
    """
    weight = module.get_parameter(name)
    experts, rows, width = stack_shape(module, weight)
    given = {"bias": False, "device": "meta", "dtype": weight.dtype}
    a = nn.Linear(width, spec.rank * experts, **given)
    b = nn.Linear(spec.rank * experts, rows, **given)
    for each, placements in zip((a, b), _placements(module, name, spec.rank, part), strict=True):
        declare_roles(each, weight="hidden")
        vars(each)["placements"] = placements
    key, own = key_of(part), type(module)
    if not isinstance(module, AdaptedStack | AdaptedExperts):
        kind = AdaptedStack if isinstance(module, StackedLinear) else AdaptedExperts
        module.__class__ = type(f"Adapted{own.__name__}", (kind, own), {})
        module.register_module("lora", nn.ModuleDict())
        vars(module)["sums"] = {}
    if isinstance(module, AdaptedExperts):
        setattr(type(module), name, _read(name))
    module.get_submodule("lora").add_module(key, StackAdapter(a, b, experts, spec.scale))


def _read(name: str) -> Any:
    """Return a property that reads a stack, with its adapter while a forward runs."""

    def value(module: Any) -> Tensor | None:
        found: Tensor | None = module.sums.get(name, module._parameters[name])
        return found

    return property(value)


def _placements(
    module: nn.Module, name: str, rank: int, part: TensorPart
) -> tuple[Placements, Placements]:
    """Return the placements of A and B, from those of the stack."""
    declared: Placements = getattr(module, "placements", {})
    given = declared.get(name, ())
    outputs = 2 if is_transposed(module) else 1
    experts = part.shape[0]
    of_a: list[Placement] = []
    of_b: list[Placement] = []
    for each in given if isinstance(given, tuple) else (given,):
        if isinstance(each, Partial):
            of_a.append(each)
            of_b.append(each)
        elif isinstance(each, Shard) and each.dim == 0:
            of_a.append(Shard(each.axis, 0))
            of_b.append(Shard(each.axis, 1, (Chunk(experts),) * rank))
        elif isinstance(each, Shard) and each.dim == outputs:
            of_a.append(Partial(each.axis))
            of_b.append(Shard(each.axis, 0, each.chunks))
        elif isinstance(each, Shard):
            of_a.append(Shard(each.axis, 1, each.chunks))
            of_b.append(Partial(each.axis))
    return {"weight": (*of_a,)}, {"weight": (*of_b,)}
