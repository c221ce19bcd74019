"""Copies on meta of modules, of which `_init_weights` changes what it is given, and of tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


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


def on_meta(value: Any) -> Any:
    """Return a tensor on meta; a window, which is one number on the CPU, stays."""
    return value.to("meta") if isinstance(value, Tensor) and value.numel() > 1 else value


def alike_on_meta(known: dict[int, Tensor], value: Any) -> Any:
    """Return a tensor (any shape) on meta that shares memory with those that ``value`` does.

    ``known`` has a tensor on meta for each storage.
    """
    if not isinstance(value, Tensor) or value.numel() <= 1:
        return value
    storage = value.untyped_storage()
    if storage._cdata not in known:
        held = storage.nbytes() // value.itemsize
        known[storage._cdata] = torch.empty(held, dtype=value.dtype, device="meta")
    base = known[storage._cdata]
    return base.as_strided(value.shape, value.stride(), int(value.storage_offset()))
