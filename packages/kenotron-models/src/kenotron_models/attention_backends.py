"""Attention of queries to the keys that they see, by one of several back ends.

Shapes: B rows, S tokens of a row, H query heads, G key and value heads (G divides H, and head h
uses h // (H / G)), K features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kenotron_cp import Scoring
from kenotron_models import attention_flash as flash
from kenotron_models import attention_varlen as varlen
from kenotron_models.attention_blocked import attend_blocks
from kenotron_models.attention_flash import attend_flash, check_installed, flash_runs
from kenotron_models.attention_mask import AttentionMask
from kenotron_models.attention_reference import attend_masked, attend_plain
from kenotron_models.attention_varlen import attend_varlen

AttentionBackend = Literal["auto", "sdpa", "flash_attn", "varlen", "blocked", "plain"]
"""Names of the attention backends."""
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
Attend = Callable[[Tensor, Tensor, Tensor, AttentionMask, Scoring], Tensor]
"""(q (B, S, H, K), k and v (B, S, G, K), what is seen, what changes the scores) -> (B, S, H, K)."""


class Backend(NamedTuple):
    """A function that computes attention."""

    attend: Attend
    supports: frozenset[str]
    """Fields of ``Scoring`` that it applies; all have the scale."""


def attend(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    sight: AttentionMask,
    scoring: Scoring,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """``softmax(scale * q k^T) v`` over the keys that each query sees: (B, S, H, K).

    With dropout the plain back end computes, whatever was chosen. Raises ValueError when an ordered
    back end cannot run on these tensors, or does not support the scoring.
    """
    name = backend if scoring.dropout is None else "plain"
    if not needs_more_than_scale(scoring):
        name = chosen(q_BSHK, sight) if name == "auto" else name
    elif q_BSHK.is_meta and name != "plain":  # what a kernel would keep; numbers do not matter
        name = "sdpa"
    else:
        name = chosen_for(q_BSHK, scoring) if name == "auto" else name
        check_backend(name, scoring)
    return BACKENDS[name].attend(q_BSHK, k_BSGK, v_BSGK, sight, scoring)


def attend_kept(
    q_BSHK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attention of new tokens to L that a cache keeps: (B, S, H, K).

    Args:
        q_BSHK: queries.
        k_BGLK: kept keys, the new tokens' own among them.
        v_BGLK: their values.
        mask: which of them each token sees, bool (B, 1, S, L); None: all.
        scoring: what changes the scores.

    Raises:
        ValueError: a scoring with dropout, or one that no back end supports.
    """
    if needs_more_than_scale(scoring):
        able = BACKENDS["plain"].supports - {"dropout"}
        scoring.check("attention to a cache", able, "remove it, or use no cache")
        return attend_masked(q_BSHK, k_BGLK, v_BGLK, mask, scoring)
    q, scale = q_BSHK.transpose(1, 2), scoring.scale
    if q.shape[2] == 1:  # query heads of one kv head as rows: keys and values are read once
        rows = q.reshape(*k_BGLK.shape[:2], -1, q.shape[3])
        mixed = F.scaled_dot_product_attention(rows, k_BGLK, v_BGLK, mask, scale=scale)
        return mixed.reshape(q.shape).transpose(1, 2)
    grouped = q.shape[1] != k_BGLK.shape[1]
    mixed = F.scaled_dot_product_attention(q, k_BGLK, v_BGLK, mask, scale=scale, enable_gqa=grouped)
    return mixed.transpose(1, 2)


def needs_more_than_scale(scoring: Scoring) -> bool:
    """Return whether torch's own attention does not support a scoring."""
    return bool(scoring.unsupported(BACKENDS["sdpa"].supports))


def check_backend(backend: AttentionBackend, scoring: Scoring) -> None:
    """Raise ValueError for a back end that is not installed, or does not support the scoring."""
    if backend != "auto" and scoring.unsupported(BACKENDS[backend].supports):
        able = [name for name, each in BACKENDS.items() if not scoring.unsupported(each.supports)]
        advice = f"choose auto or {' or '.join(able)}" if able else "no back end supports it"
        scoring.check(f"attention back end {backend}", BACKENDS[backend].supports, advice)
    if backend == "flash_attn":
        check_installed()


def prepare(sight: AttentionMask, backend: AttentionBackend) -> None:
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


def chosen(q_BSHK: Tensor, sight: AttentionMask) -> AttentionBackend:
    """Return what ``auto`` means for queries (B, S, H, K)."""
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


def chosen_for(q_BSHK: Tensor, scoring: Scoring) -> AttentionBackend:
    """Return what ``auto`` means for a scoring with more than a scale: the first that has it.

    Queries are (B, S, H, K).
    """
    if flash_runs(q_BSHK) and not scoring.unsupported(BACKENDS["flash_attn"].supports):
        return "flash_attn"
    return "plain" if scoring.unsupported(BACKENDS["blocked"].supports) else "blocked"


def ragged_kernel(sight: AttentionMask) -> AttentionBackend | None:
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


def sdpa_order(sight: AttentionMask) -> list[SDPBackend] | None:
    """Return the order of torch's kernels on the micro-batch's device; None: torch's own order."""
    device = sight.context.positions_BS.device
    return sight.context.once(
        "sdpa order", lambda: CUDNN_FIRST if varlen.capability(device) >= HOPPER else None
    )


def blocks_beat_masks(sight: AttentionMask, device: torch.device) -> bool:
    """Return True where blocks are faster than torch's own attention under a mask."""
    return device.type == "cpu" and sight.sequence >= MASKED_BLOCKS


def attend_sdpa(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, sight: AttentionMask, scoring: Scoring
) -> Tensor:
    """torch's own attention, with a mask only if there is more to hide than the future.

    Queries (B, S, H, K), keys and values (B, S, G, K), result (B, S, H, K).
    """
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
            scale=scoring.scale,
            enable_gqa=grouped,
        )
    return mixed.transpose(1, 2)


BACKENDS: dict[AttentionBackend, Backend] = {
    "sdpa": Backend(attend_sdpa, frozenset({"scale"})),
    "flash_attn": Backend(attend_flash, frozenset({"scale", "cap"})),
    "varlen": Backend(attend_varlen, frozenset({"scale"})),
    "blocked": Backend(attend_blocks, frozenset({"scale", "cap", "sinks"})),
    "plain": Backend(attend_plain, frozenset({"scale", "cap", "sinks", "dropout"})),
}


def keep_out_of_programs() -> None:
    """Let ``torch.compile`` call back ends that it cannot compile instead of looking into them.

    To be called before anything is compiled: loading the compiler here would cost every import a
    second.
    """
    names: tuple[AttentionBackend, ...] = ("blocked", "flash_attn", "varlen")
    for name, function in zip(names, (attend_blocks, attend_flash, attend_varlen), strict=True):
        BACKENDS[name] = BACKENDS[name]._replace(attend=torch.compiler.disable(function))
