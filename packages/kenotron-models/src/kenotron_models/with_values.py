"""Copies of modules with other values in place of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def with_values(module: Module, values: Mapping[str, Tensor]) -> Module:
    """Return a copy of a module that has these values (any shapes) in place of its parameters.

    The copy lives as long as its graph: what the backward computes again reads them, too.
    """
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    children = {
        name: None if child is None else with_values(child, _below(values, name))
        for name, child in module._modules.items()
    }
    own = {name: values[name] if name in values else p for name, p in module._parameters.items()}
    made.__dict__.update(_modules=children, _parameters=own)
    return made


def _below(values: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    start = f"{name}."
    return {key.removeprefix(start): x for key, x in values.items() if key.startswith(start)}
