"""Copies of modules for transformers' `_init_weights`, which changes what it is given."""

from __future__ import annotations

import copy

import torch
from torch import nn


def meta_twin(module: nn.Module) -> nn.Module:
    """Return a copy of a module and all below it whose parameters are on meta."""
    twin = copy.copy(module)
    twin._parameters = {
        name: None if p is None else nn.Parameter(torch.empty_like(p, device="meta"))
        for name, p in module._parameters.items()
    }
    twin._buffers = {
        name: None if each is None else torch.empty_like(each, device="meta")
        for name, each in module._buffers.items()
    }
    twin._modules = {
        name: None if child is None else meta_twin(child) for name, child in module._modules.items()
    }
    return twin
