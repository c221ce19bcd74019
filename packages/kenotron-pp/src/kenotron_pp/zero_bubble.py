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
        self.ranks, self.microbatches, self.reserved = ranks, microbatches, reserved
        self.last = 2 * ranks - 1
        counts = [0] * (2 * ranks)
        self.done = {kind: list(counts) for kind in "FIW"}
        """Number of micro-batches that every stage has done, by kind."""
        self.lists: list[list[Step]] = [[] for _ in range(ranks)]

    def run(self) -> tuple[int, Lists]:
        """Ticks and lists, when every action takes one tick."""
        ticks = 0
        while any(len(steps) < 6 * self.microbatches for steps in self.lists):
            chosen = [(rank, step) for rank in range(self.ranks) if (step := self._next(rank))]
            assert chosen  # a rank that waits for memory has a weight part to do
            for rank, step in chosen:
                self.done[step[0]][self._stage(rank, step[2])] += 1
                self.lists[rank].append(step)
            ticks += 1
        return ticks, tuple(tuple(steps) for steps in self.lists)

    def _stage(self, rank: int, chunk: int) -> int:
        return self.last - rank if chunk else rank

    def _next(self, rank: int) -> Step | None:
        for chunk in (1, 0):
            stage = self._stage(rank, chunk)
            after = self.done["I"][stage + 1] if stage < self.last else self.microbatches
            m = self.done["I"][stage]
            if m < min(self.done["F"][stage], after):
                return "I", m, chunk
        own = [self._stage(rank, chunk) for chunk in (0, 1)]
        kept = sum(self.done["F"][stage] - self.done["W"][stage] for stage in own)
        for chunk in (1, 0):
            m = self.done["F"][own[chunk]]
            before = self.done["F"][own[chunk] - 1] if own[chunk] else self.microbatches
            room = 2 * self.ranks - kept - (0 if chunk else self.reserved)
            if m < before and room > 0:
                return "F", m, chunk
        for chunk in (1, 0):
            m = self.done["W"][own[chunk]]
            if m < self.done["I"][own[chunk]]:
                return "W", m, chunk
        return None
