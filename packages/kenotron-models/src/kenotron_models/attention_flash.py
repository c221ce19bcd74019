"""Attention by the package flash-attn (Dao, arXiv 2307.08691), where it is installed.

Shapes: B rows, S tokens of a row, H query heads, G key and value heads, K features of a head.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from kenotron_cp import Scoring
from kenotron_models.attention_mask import AttentionMask

MAX_FEATURES = 256  # of a head, in flash-attn 2
MULTIPLE = 8
HALVES = (torch.float16, torch.bfloat16)


@functools.cache
def installed() -> bool:
    """Return True where flash-attn can be imported; looked up once."""
    return importlib.util.find_spec("flash_attn") is not None


def check_installed() -> None:
    """Raise ValueError that says what to install."""
    if not installed():
        raise ValueError(
            "attention back end flash_attn: the package is not installed; install flash-attn "
            "(pip install flash-attn), or choose auto or sdpa"
        )


def problem(q_BSHK: Tensor) -> str | None:
    """Return why flash-attn cannot compute with queries (B, S, H, K); None: it can."""
    if not q_BSHK.is_cuda:
        return f"tensors are on {q_BSHK.device.type}; it needs a CUDA device"
    if q_BSHK.dtype not in HALVES:
        return (
            f"tensors are {str(q_BSHK.dtype).removeprefix('torch.')}; it needs bfloat16 or float16"
        )
    if (width := q_BSHK.shape[-1]) > MAX_FEATURES or width % MULTIPLE:
        return (
            f"heads have {width} features; it needs a multiple of {MULTIPLE} up to {MAX_FEATURES}"
        )
    return None


def flash_runs(q_BSHK: Tensor) -> bool:
    """Return True where flash-attn is installed and can compute with queries (B, S, H, K)."""
    return problem(q_BSHK) is None and installed()


def attend_flash(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, sight: AttentionMask, scoring: Scoring
) -> Tensor:
    """Documents become sequences of their own lengths; windows are flash-attn's own: (B, S, H, K).

    flash-attn has a cap of the scores from version 2.6 on.

    Raises ValueError when it is not installed, or for another device, dtype or width of heads.
    """
    check_installed()
    if (why := problem(q_BSHK)) is not None:
        raise ValueError(f"attention back end flash_attn: {why}; change it, or choose auto or sdpa")
    flash: Any = importlib.import_module("flash_attn")
    left = -1 if sight.window is None else sight.window - 1  # tokens before the own one
    window = (left, 0 if left >= 0 else -1)
    how = {"softmax_scale": scoring.scale, "causal": True, "window_size": window}
    if scoring.cap is not None:
        how["softcap"] = scoring.cap
    how["deterministic"] = torch.are_deterministic_algorithms_enabled()  # of the backward
    if not sight.documents:
        return flash.flash_attn_func(q_BSHK, k_BSGK, v_BSGK, **how)
    begins, longest = sight.lengths
    q, k, v = (x.flatten(0, 1) for x in (q_BSHK, k_BSGK, v_BSGK))
    mixed = flash.flash_attn_varlen_func(q, k, v, begins, begins, longest, longest, **how)
    return mixed.view_as(q_BSHK)
