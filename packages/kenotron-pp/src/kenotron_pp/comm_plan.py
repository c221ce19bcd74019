"""Communication of a rank: which transfers it sends, awaits, posts ahead and lets go.

Pure. The rules, for every schedule:

- A queue carries one direction between two ranks, in the order in which its sender produces; the
  receiver posts its receives in that order. Where a backend runs all transfers of a group in one
  order (NCCL), each queue needs its own group. Then the order adds no waiting that the sender's
  own list has not: the k-th receive ends when the sender has produced k results, whatever else goes
  on. A schedule that ``simulate`` accepts cannot deadlock.
- Before an action computes, the receive of the next one is posted.
- A sent tensor is let go before the first action that, in the simulation, begins later than
  the receiver's use of it. That wait always points back in simulated time, so no circle can close.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from kenotron_pp.schedule import Action, Schedule, rank_actions
from kenotron_pp.simulate import Times, play


class Transfer(NamedTuple):
    """An activation going down or a gradient going up, from one rank to another."""

    direction: Literal["down", "up"]
    stage: int
    """The stage that produced it."""
    microbatch: int
    source: int
    """Index of the sending rank along the axis."""
    to: int

    @property
    def boundary(self) -> int:
        """The stage whose output this is, or whose output's gradient."""
        return self.stage if self.direction == "down" else self.stage - 1


class PlannedAction(NamedTuple):
    """One action and the transfers around it."""

    action: Action
    stage: int
    need: Transfer | None
    """Transfer that another rank must have sent before."""
    following: Transfer | None
    """Transfers that the next receiving action needs: posted before this one computes."""
    underway: tuple[Transfer, ...]
    """The latest of each queue that has left its sender when this action begins, in the
    simulation: waiting for it is waiting for nothing that this rank has still to do."""
    result: Transfer | None
    """Destination of the result; None when it stays on this rank."""
    release: tuple[Transfer, ...]
    """Sent tensors that are let go before this action."""


class RankPlan(NamedTuple):
    """Everything one rank does."""

    steps: tuple[PlannedAction, ...]
    queues: dict[int, tuple[Transfer, ...]]
    """By source rank: everything it sends to this one, in its order."""


def make_plan(
    schedule: Schedule, rank: int, ranks: int, microbatches: int, *, forward_only: bool = False
) -> RankPlan:
    """The plan of one rank. Raises ValueError when ``simulate`` would refuse the schedule."""
    lists = rank_actions(schedule, ranks, microbatches)
    if forward_only:
        lists = [[action for action in actions if action.kind == "F"] for actions in lists]
    spans = play(schedule, lists, microbatches, Times())
    sends = [[_result(schedule, a, r, ranks) for a in actions] for r, actions in enumerate(lists)]
    queues = {
        source: tuple(sent for sent in sends[source] if sent is not None and sent.to == rank)
        for source in range(ranks)
    }
    needs = [_need(schedule, action, rank, ranks) for action in lists[rank]]
    starts = spans[rank][0]
    used = {
        _need(schedule, action, r, ranks): start
        for r, (actions, (begun, _)) in enumerate(zip(lists, spans, strict=True))
        for action, start in zip(actions, begun, strict=True)
    }
    produced = {
        result: end
        for own, (_, over) in zip(sends, spans, strict=True)
        for result, end in zip(own, over, strict=True)
    }
    release = _releases(sends[rank], starts, used)
    steps = []
    for i, action in enumerate(lists[rank]):
        following = next((need for need in needs[i + 1 :] if need is not None), None)
        stage = schedule.stage(rank, action.chunk, ranks)
        underway = tuple(
            sent[-1]
            for queue in queues.values()
            if (sent := [each for each in queue if produced[each] <= starts[i]])
        )
        steps.append(
            PlannedAction(action, stage, needs[i], following, underway, sends[rank][i], release[i])
        )
    return RankPlan(tuple(steps), {source: queue for source, queue in queues.items() if queue})


def _releases(
    sent: Sequence[Transfer | None], starts: Sequence[float], used: dict[Transfer | None, float]
) -> list[tuple[Transfer, ...]]:
    """For every action, the sends that end before it; what is left over ends after the last."""
    found: list[tuple[Transfer, ...]] = []
    held: list[Transfer] = []
    for transfer, start in zip(sent, starts, strict=True):
        done = tuple(each for each in held if used[each] < start)
        held = [each for each in held if each not in done]
        found.append(done)
        if transfer is not None:
            held.append(transfer)
    return found


def _need(schedule: Schedule, action: Action, rank: int, ranks: int) -> Transfer | None:
    stage = schedule.stage(rank, action.chunk, ranks)
    if action.kind == "W":
        return None
    if action.kind == "F":
        return _transfer(schedule, "down", stage - 1, stage, action.microbatch, ranks)
    return _transfer(schedule, "up", stage + 1, stage, action.microbatch, ranks)


def _result(schedule: Schedule, action: Action, rank: int, ranks: int) -> Transfer | None:
    stage = schedule.stage(rank, action.chunk, ranks)
    if action.kind == "W":
        return None
    if action.kind == "F":
        return _transfer(schedule, "down", stage, stage + 1, action.microbatch, ranks)
    return _transfer(schedule, "up", stage, stage - 1, action.microbatch, ranks)


def _transfer(
    schedule: Schedule,
    direction: Literal["down", "up"],
    stage: int,
    target: int,
    microbatch: int,
    ranks: int,
) -> Transfer | None:
    last = ranks * schedule.chunks - 1
    if not (0 <= stage <= last and 0 <= target <= last):
        return None
    source, to = schedule.place(stage, ranks)[0], schedule.place(target, ranks)[0]
    return None if source == to else Transfer(direction, stage, microbatch, source, to)
