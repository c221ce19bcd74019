"""Attention with gathered keys: each rank has all keys of a few heads at a time.

The keys of the next heads arrive while the present ones are used. Keys are gathered again in the
backward pass instead of kept. Memory: the keys of the whole sequence, of twice ``stride`` heads; in
backward the gradients of ``stride`` heads, in fp32, those that leave and those that arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from kenotron_cp.block_backward import BlockBackward
from kenotron_cp.block_forward import forward
from kenotron_cp.kernels import accumulated
from kenotron_cp.problem import Problem
from kenotron_cp.returned_gradients import differentiate
from kenotron_dist import Axis, all_gather


def gather_forward(
    p: Problem, axis: Axis, q: Tensor, kv: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """Attend with the keys of ``stride`` heads at a time; an all-gather over ``axis`` for each.

    Args:
        p: the problem.
        axis: the ranks over which the sequence is cut.
        q: (B, H, n, D).
        kv: own keys and values by chunk, (chunks, B, K, n / chunks, D + V).
        stride: key heads that are gathered at a time.

    Returns:
        out (B, H, n, V) and lse (B, H, n).
    """
    width = kv.shape[-1] - p.depth
    out = q.new_empty(*q.shape[:3], width)
    lse = q.new_empty(q.shape[:3], dtype=accumulated(q.dtype))
    for part, heads, chunks in _gathered(p, axis, q.shape[1], kv, stride):
        out[:, heads], lse[:, heads] = forward(part, q[:, heads], [chunks], width)
    return out, lse


def gather_backward(
    p: Problem,
    axis: Axis,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    stride: int,
) -> tuple[Tensor, Tensor]:
    """Gather again; an all-to-all over ``axis`` returns the keys' gradients of each step.

    Returns:
        dq (B, H, n, D) and dkv (B, K, n, D + V) in the dtype of q.
    """
    batch, kv_heads, many = kv.shape[1], kv.shape[2], p.copies
    group = q.shape[1] // kv_heads
    dq, dkv = q.new_empty(q.shape), kv.new_empty(batch, kv_heads * many, q.shape[2], kv.shape[-1])
    for part, heads, chunks in _gathered(p, axis, q.shape[1], kv, stride):
        some = (x[:, heads] for x in (q, grad, out, lse))
        own = slice(heads.start // group, heads.stop // group)
        work = BlockBackward(part, *some, kv_heads=own.stop - own.start)
        # These gradients travel while own ones are computed, and are added before those of the
        # next heads are made.
        returning = differentiate(part, axis, work, chunks).start(axis)
        work.over_own(chunks)
        returning.keep(work)
        del returning
        dq[:, heads], dkv[:, own.start * many : own.stop * many] = work.take()
    return dq, dkv


def _gathered(
    p: Problem, axis: Axis, heads: int, kv: Tensor, stride: int
) -> Iterator[tuple[Problem, slice, dict[int, Tensor]]]:
    """Yield the problem of some heads, these query heads, and all chunks of their keys.

    What was yielded is emptied when the next heads are asked for, which frees its buffer.
    """
    group, parts = heads // kv.shape[2], kv.split(stride, 2)
    handle = all_gather(parts[0][None].contiguous(), axis, 0, async_op=True)
    for number, part in enumerate(parts):
        rows = handle.wait()
        if number + 1 < len(parts):
            handle = all_gather(parts[number + 1][None].contiguous(), axis, 0, async_op=True)
        begin = number * stride * group
        end = begin + part.shape[2] * group
        chunks = {
            m: each
            for rank, row in enumerate(rows.unbind())
            for m, each in zip(p.cut.held(rank), row.unbind(), strict=True)
        }
        del rows
        yield replace(p, scoring=p.scoring.of_heads(begin, end)), slice(begin, end), chunks
        chunks.clear()
