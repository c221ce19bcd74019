"""Attention over sequences of several lengths by torch's kernel: documents and windows on CUDA.

Shapes: B rows, S tokens of a row, T = B * S, H query heads, G key and value heads, K features of a
head.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kenotron_cp import Scoring
from kenotron_models.attention_flash import problem
from kenotron_models.attention_mask import AttentionMask

MODULE = "torch.nn.attention.varlen"
MIN_CAPABILITY = (8, 0)
"""Of the CUDA device: what flash attention, which the kernel is, needs."""


@functools.cache
def installed() -> bool:
    """Return whether this torch has the kernel; looked up once, without importing it."""
    return importlib.util.find_spec(MODULE) is not None


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; (0, 0) elsewhere."""
    if device.type != "cuda":
        return (0, 0)
    return torch.get_device_module(device).get_device_capability(device)


def device_has_varlen(device: torch.device) -> bool:
    """Return whether the kernel is there and runs on this device."""
    return capability(device) >= MIN_CAPABILITY and installed()


def varlen_runs(q_BSHK: Tensor) -> bool:
    """Return whether the kernel can compute with queries (B, S, H, K), on a device that has it."""
    return problem(q_BSHK) is None  # both are flash attention 2


def attend_varlen(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, sight: AttentionMask, scoring: Scoring
) -> Tensor:
    """Documents become sequences of their own lengths; without documents rows do.

    Returns:
        (B, S, H, K).
    """
    function, accepted = _kernel()
    begins, longest = sight.lengths
    q, k, v = (x.flatten(0, 1) for x in (q_BSHK, k_BSGK, v_BSGK))
    how: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in accepted:
            how["enable_gqa"] = True
        else:  # torch 2.11
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if "scale" in accepted:
        how["scale"] = scoring.scale
    else:
        q = q * (scoring.scale * math.sqrt(q.shape[-1]))
    left = -1 if sight.window is None else sight.window - 1  # tokens before the own one
    how["window_size"] = (left, 0)
    mixed = function(q, k, v, begins, begins, longest, longest, **how)
    return mixed.view_as(q_BSHK)


@functools.cache
def _kernel() -> tuple[Callable[..., Any], frozenset[str]]:
    """Return the kernel and the names of its parameters, which differ between versions of torch."""
    function = importlib.import_module(MODULE).varlen_attn
    return function, frozenset(inspect.signature(function).parameters)
