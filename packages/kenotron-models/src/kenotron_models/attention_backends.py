"""Attention of queries to the keys that they see, by one of several back ends.

Shapes: B rows, S tokens of a row, H query heads, G key and value heads (G divides H, and head h
uses h // (H / G)), K features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kenotron_models import attention_flash as flash
from kenotron_models import attention_varlen as varlen
from kenotron_models.attention_blocked import attend_blocks
from kenotron_models.attention_flash import attend_flash, check_installed, flash_runs
from kenotron_models.attention_mask import Sight
from kenotron_models.attention_reference import Dropout, attend_plain
from kenotron_models.attention_varlen import attend_varlen

AttentionBackend = Literal["auto", "sdpa", "flash_attn", "varlen", "blocked", "plain"]
"""What may compute attention."""
MASKED_BLOCKS = 512
"""Tokens of a row from which blocks are faster on the CPU where more than the future is hidden."""
CAUSAL_BLOCKS = 256
"""The same where it is not, in bfloat16, for heads of at most BLOCKS_WIDTH features."""
BLOCKS_WIDTH = 64
"""All measured by benchmarks/bench_attention.py."""
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Order of torch's kernels on devices of HOPPER and later, where cuDNN's uses their own units."""
HOPPER = (9, 0)
CAPS: tuple[AttentionBackend, ...] = ("plain", "blocked", "flash_attn")
"""Back ends that can cap scores."""
SINKS: tuple[AttentionBackend, ...] = ("plain", "blocked")
"""Those that can have sinks."""


Attend = Callable[..., Tensor]
"""(q (B, S, H, K), k and v (B, S, G, K), what is seen, scale) -> (B, S, H, K); ``cap`` and
``sinks`` by keyword for those that have them."""


def attend(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    sight: Sight,
    *,
    scale: float,
    backend: AttentionBackend = "auto",
    dropout: Dropout | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``softmax(scale * q k^T) v`` over the keys that each query sees: (B, S, H, K).

    ``cap`` and ``sinks`` (H,): as ``attention_reference.shares_of`` has them. With ``dropout`` the
    plain back end computes, whatever was chosen. Raises ValueError when an ordered back end cannot
    run on these tensors, or has no caps or sinks.
    """
    if dropout is not None:
        return attend_plain(q_BSHK, k_BSGK, v_BSGK, sight, scale, dropout, cap=cap, sinks=sinks)
    if cap is None and sinks is None:
        name = chosen(q_BSHK, sight) if backend == "auto" else backend
        return BACKENDS[name](q_BSHK, k_BSGK, v_BSGK, sight, scale)
    if q_BSHK.is_meta and backend != "plain":  # what a kernel would keep; numbers do not matter
        return attend_sdpa(q_BSHK, k_BSGK, v_BSGK, sight, scale)
    check_backend(backend, cap=cap is not None, sinks=sinks is not None)
    name = backend
    if backend == "auto":
        name = "flash_attn" if sinks is None and flash_runs(q_BSHK) else "blocked"
    more = {"cap": cap} if sinks is None else {"cap": cap, "sinks": sinks}
    return BACKENDS[name](q_BSHK, k_BSGK, v_BSGK, sight, scale, **more)


def check_backend(backend: AttentionBackend, *, cap: bool = False, sinks: bool = False) -> None:
    """Raise ValueError for a back end that is not installed, or has no caps or sinks."""
    for wanted, able, what in ((cap, CAPS, "caps of scores"), (sinks, SINKS, "attention sinks")):
        if wanted and backend not in ("auto", *able):
            raise ValueError(
                f"attention back end {backend}: it has no {what}; choose auto or "
                f"{' or '.join(able)}"
            )
    if backend == "flash_attn":
        check_installed()


def prepare(sight: Sight, backend: AttentionBackend) -> None:
    """Make what the back end reads of ``sight`` once for the micro-batch, not in a compiled layer.

    The blocked and flash back ends are never part of one.
    """
    _ = sight.first_BS
    if backend == "plain":
        _ = sight.full_mask_BSS
    elif backend == "auto" and ragged_kernel(sight) is not None:
        _ = sight.lengths
    elif backend in ("sdpa", "auto"):
        _ = sight.mask_BSS, sdpa_order(sight)


def chosen(q_BSHK: Tensor, sight: Sight) -> AttentionBackend:
    """Return what ``auto`` means for these queries."""
    kernel = ragged_kernel(sight)
    if torch.compiler.is_compiling():  # a program can contain sdpa, and calls the others
        return kernel if kernel is not None and varlen.varlen_runs(q_BSHK) else "sdpa"
    if flash_runs(q_BSHK):
        return "flash_attn"
    if kernel is not None and varlen.varlen_runs(q_BSHK):
        return kernel
    if sight.whole:
        fast = q_BSHK.dtype == torch.bfloat16 and q_BSHK.shape[-1] <= BLOCKS_WIDTH
        wins = fast and q_BSHK.device.type == "cpu" and sight.sequence >= CAUSAL_BLOCKS
    else:
        wins = blocks_beat_masks(sight, q_BSHK.device)
    return "blocked" if wins else "sdpa"


def ragged_kernel(sight: Sight) -> AttentionBackend | None:
    """Return the back end that needs no full-square mask where more than the future is hidden.

    None where nothing more is hidden, or the device has no such kernel. Made once per micro-batch.
    """

    def find() -> AttentionBackend | None:
        device = sight.context.positions_BS.device
        if sight.whole:
            return None
        if device.type == "cuda" and flash.installed():
            return "flash_attn"
        return "varlen" if varlen.device_has_varlen(device) else None

    return sight.context.once(("ragged kernel", sight.window, sight.documents), find)


def sdpa_order(sight: Sight) -> list[SDPBackend] | None:
    """Return the order of torch's kernels on the micro-batch's device; None: torch's own order."""
    device = sight.context.positions_BS.device
    return sight.context.once(
        "sdpa order", lambda: CUDNN_FIRST if varlen.capability(device) >= HOPPER else None
    )


def blocks_beat_masks(sight: Sight, device: torch.device) -> bool:
    """Whether blocks are faster than torch's own attention under a mask."""
    return device.type == "cpu" and sight.sequence >= MASKED_BLOCKS


def attend_sdpa(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, sight: Sight, scale: float
) -> Tensor:
    """torch's own attention, with a mask only if there is more to hide than the future."""
    mask = sight.mask_BSS
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
    grouped = q.shape[1] != k.shape[1]
    if grouped and mask is not None and q.is_cuda:  # no fused kernel takes a mask and groups
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        grouped = False
    order = sdpa_order(sight) if mask is None else None
    with nullcontext() if order is None else sdpa_kernel(order, set_priority=True):
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask[:, None],
            is_causal=mask is None,
            scale=scale,
            enable_gqa=grouped,
        )
    return mixed.transpose(1, 2)


BACKENDS: dict[AttentionBackend, Attend] = {
    "sdpa": attend_sdpa,
    "flash_attn": attend_flash,
    "varlen": attend_varlen,
    "blocked": attend_blocks,
    "plain": attend_plain,
}


def keep_out_of_programs() -> None:
    """Let ``torch.compile`` call back ends that it cannot compile instead of looking into them.

    To be called before anything is compiled: loading the compiler here would cost every import a
    second.
    """
    BACKENDS["blocked"] = torch.compiler.disable(attend_blocks)
    BACKENDS["flash_attn"] = torch.compiler.disable(attend_flash)
    BACKENDS["varlen"] = torch.compiler.disable(attend_varlen)
