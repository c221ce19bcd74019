"""What every rank sends and awaits, checked for all small sizes without processes."""

from __future__ import annotations

import pytest

from kenotron_pp import (
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from kenotron_pp.comm_plan import RankPlan, make_plan

SIZES = [(ranks, m) for ranks in range(1, 7) for m in (1, 2, 3, 5, 8, 13)]
ALL = [gpipe, one_f_one_b, interleaved(2), interleaved(3), zero_bubble_h1, zero_bubble_v]


def ordered(plan: RankPlan, rank: int) -> None:
    """Both ends of a queue agree, and nothing is awaited that was not posted."""
    posted = set()
    for step in plan.steps:
        for wanted in (step.need, step.following):
            if wanted is not None:
                queue = plan.queues[wanted.source]
                posted |= set(queue[: queue.index(wanted) + 1])
        assert step.need is None or step.need in posted
        assert step.result is None or step.result.source == rank
    assert posted == {transfer for queue in plan.queues.values() for transfer in queue}


def run_blocking(plans: list[RankPlan]) -> None:
    """Execute the plans where a send ends only when its receive is posted: the strictest backend.

    A rank stops at a receive whose sender has not produced, and at the release of a send whose
    receiver has not posted.
    """
    place, produced, posted = [0] * len(plans), set(), set()
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            while place[rank] < len(plan.steps):
                step = plan.steps[place[rank]]
                for wanted in (step.need, step.following):
                    if wanted is not None:
                        queue = plan.queues[wanted.source]
                        posted |= set(queue[: queue.index(wanted) + 1])
                if not set(step.release) <= posted or {step.need} - {None} - produced:
                    break
                produced.add(step.result)
                place[rank] += 1
                moved = True
    assert place == [len(plan.steps) for plan in plans]


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("forward_only", [False, True])
def test_plans_of_all_ranks_fit_together(schedule: Schedule, forward_only: bool) -> None:
    for ranks, microbatches in SIZES:
        plans = [
            make_plan(schedule, rank, ranks, microbatches, forward_only=forward_only)
            for rank in range(ranks)
        ]
        for rank, plan in enumerate(plans):
            ordered(plan, rank)
            sent = [step.result for step in plan.steps if step.result is not None]
            for to, other in enumerate(plans):
                assert [t for t in sent if t.to == to] == list(other.queues.get(rank, ()))
            released = [each for step in plan.steps for each in step.release]
            assert len(released) == len(set(released)) and set(released) <= set(sent)
        run_blocking(plans)


def test_a_sent_activation_is_let_go_long_before_its_gradient_comes() -> None:
    plan = make_plan(gpipe, 0, 2, 6)
    held, most = 0, 0
    for step in plan.steps:
        held += (step.result is not None) - len(step.release)
        most = max(most, held)
    assert most == 2


def test_forward_only_has_forwards_only() -> None:
    plan = make_plan(zero_bubble_v, 1, 2, 3, forward_only=True)
    assert {step.action.kind for step in plan.steps} == {"F"}
    assert len(plan.steps) == 6
