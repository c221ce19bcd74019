"""Ring attention: in step t rank i computes with the keys of rank i - t, which arrive meanwhile.

Every rank sends its own keys straight to the rank that needs them (t places on), and only the
chunks of which that rank sees something: with zig-zag and causal attention three quarters of what
a ring that passes everything on would move. Gradients of keys return to their holder in fp32.

Memory: own keys, those of two other ranks, partial results that wait for their neighbour in the
tree, and in backward gradients of two chunks that leave and of one that arrives.

Ring attention: arXiv 2310.01889; zig-zag order and the merge by log-sum-exp: arXiv 2402.08268.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from kenotron_cp.block_backward import BlockBackward
from kenotron_cp.block_forward import forward
from kenotron_cp.problem import Problem
from kenotron_cp.returned_gradients import Returned, differentiate, turns
from kenotron_cp.visibility import BlockTable
from kenotron_dist import Axis, Handle, all_to_all


def ring_forward(p: Problem, axis: Axis, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Attend around the ring; all-to-all over ``axis`` in every step with something to send.

    Args:
        p: the problem.
        axis: the ranks over which the sequence is cut.
        q: (B, H, n, D).
        kv: own keys and values by chunk, (chunks, B, K, n / chunks, D + V).

    Returns:
        out (B, H, n, V) and lse (B, H, n).
    """
    arriving = (chunks for _, chunks in _arriving(p, axis, kv))
    return forward(p, q, arriving, kv.shape[-1] - p.depth)


def ring_backward(
    p: Problem, axis: Axis, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Send keys round again, and their gradients back, those of one pair of chunks at a time.

    All-to-alls over ``axis``: one a step for keys, and one for each pair of chunks.

    Returns:
        dq (B, H, n, D) and dkv (B, K, n, D + V) in the dtype of q.
    """
    work = BlockBackward(p, q, grad, out, lse, kv.shape[2])
    under_way: list[Returned] = []
    for offset, chunks in _arriving(p, axis, kv):
        if not offset:
            work.over_own(chunks)
            continue
        # The gradients of a pair of chunks travel while the next pair is computed. They are added
        # and their buffers freed before others arrive.
        for turn in range(turns(p, axis.size, offset)):
            leaving = differentiate(p, axis, work, chunks, offset, turn)
            if under_way:
                under_way.pop().keep(work)
            under_way.append(leaving.start(axis))
            del leaving
    if under_way:
        under_way.pop().keep(work)
    return work.take()


def _arriving(p: Problem, axis: Axis, kv: Tensor) -> Iterator[tuple[int, Mapping[int, Tensor]]]:
    """Yield the step and its chunks of keys; the next step's are under way meanwhile.

    What was yielded is emptied when the next step is asked for, which frees its buffer.
    """
    ranks, table = range(axis.size), p.table
    steps = [t for t in ranks[1:] if any(table.sent(r, (r + t) % axis.size) for r in ranks)]
    handle = _start(table, axis, kv, steps[0]) if steps else None
    yield 0, dict(zip(p.cut.held(p.rank), kv.unbind(), strict=True))
    for number, step in enumerate(steps):
        assert handle is not None  # there is a step
        rows, source = handle.wait(), (axis.rank - step) % axis.size
        if step != steps[-1]:
            handle = _start(table, axis, kv, steps[number + 1])
        chunks = dict(zip(table.sent(source, axis.rank), rows.unbind(), strict=True))
        del rows
        yield step, chunks
        chunks.clear()


def _start(table: BlockTable, axis: Axis, kv: Tensor, step: int) -> Handle:
    """Start sending chunks ``step`` places on, and receiving those from as far behind."""
    to, source = ((axis.rank + by) % axis.size for by in (step, -step))
    leaving, coming = table.sent(axis.rank, to), table.sent(source, axis.rank)
    first = table.cut.held(axis.rank).index(leaving[0]) if leaving else 0
    rows = kv[first : first + len(leaving)]  # neighbours: no copy
    send, receive = [0] * axis.size, [0] * axis.size
    send[to], receive[source] = len(leaving), len(coming)
    return all_to_all(rows, axis, send, receive, async_op=True)
