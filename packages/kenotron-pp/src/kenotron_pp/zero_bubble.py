"""The V-shaped zero-bubble order, found by playing the pipeline through (arXiv 2401.10241).

Rank r has stages r and 2 * ranks - 1 - r. Every rank takes, whenever it is free, the most urgent
action that it can begin: the input part of a backward, for which another rank waits; a forward, the
chunk nearer to the loss first, as long as memory allows; a weight part, for which no rank waits. So
the lists cannot deadlock, and every chunk's actions ascend.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

Step = tuple[Literal["F", "I", "W"], int, int]
"""(kind, micro-batch, chunk)"""
Lists = tuple[tuple[Step, ...], ...]
"""Every rank's steps."""


@cache
def zb_v_lists(ranks: int, microbatches: int) -> Lists:
    """The shortest of a few plays, at unit times.

    They differ in how many of the ``2 * ranks`` activations that a rank may keep are reserved for
    chunk 1: a first chunk that takes all of them makes the second wait.
    """
    plays = [_Play(ranks, microbatches, reserved) for reserved in range(min(ranks, 4))]
    return min((play.run() for play in plays), key=lambda result: result[0])[1]


class _Play:
    def __init__(self, ranks: int, microbatches: int, reserved: int) -> None:
        self.ranks, self.reserved = ranks, reserved
        self.last = 2 * ranks - 1
        self.done = {kind: [0] * (2 * ranks) + [microbatches] for kind in "FIW"}
        """Micro-batches that every stage has done, by kind; the last number is for a stage before
        the first one, and for one after the last one."""
        self.lists: list[list[Step]] = [[] for _ in range(ranks)]
        self.left = 6 * ranks * microbatches

    def run(self) -> tuple[int, Lists]:
        """Ticks and lists, when every action takes one tick."""
        ticks = 0
        while self.left:
            chosen = [(rank, step) for rank in range(self.ranks) if (step := self._next(rank))]
            assert chosen  # a rank that waits for memory has a weight part to do
            for rank, step in chosen:
                self.done[step[0]][self.last - rank if step[2] else rank] += 1
                self.lists[rank].append(step)
            self.left -= len(chosen)
            ticks += 1
        return ticks, tuple(tuple(steps) for steps in self.lists)

    def _next(self, rank: int) -> Step | None:
        forward, inputs, weights = self.done.values()
        up, down = self.last - rank, rank
        for chunk, stage in (1, up), (0, down):
            m = inputs[stage]
            if m < forward[stage] and m < inputs[stage + 1]:
                return "I", m, chunk
        room = 2 * self.ranks - forward[up] - forward[down] + weights[up] + weights[down]
        if forward[up] < forward[up - 1] and room > 0:
            return "F", forward[up], 1
        if forward[down] < forward[down - 1] and room > self.reserved:
            return "F", forward[down], 0
        for chunk, stage in (1, up), (0, down):
            m = weights[stage]
            if m < inputs[stage]:
                return "W", m, chunk
        return None
