"""Pipeline schedules as plain lists of actions: what one rank does, in order.

A model is cut in stages; a rank has one of them, or several, which are then its chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from numbers import Integral
from typing import Literal, NamedTuple

from kenotron_pp.zero_bubble import zb_v_lists

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; its input part; its weight part."""
Wiring = Literal["loop", "v"]
"""Order of stages on ranks when each has several: 0 1 2 0 1 2, or 0 1 2 2 1 0."""


class Action(NamedTuple):
    """Work of a rank on one micro-batch in one of its chunks."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Order = Callable[[int, int, int], list[Action]]
"""(rank, number of ranks, number of micro-batches) -> that rank's actions."""


@dataclass(frozen=True)
class Schedule:
    """An order of actions for every rank, micro-batch count and pipeline length."""

    name: str
    order: Order
    chunks: int = 1
    """Stages of each rank."""
    wiring: Wiring = "loop"
    splits: bool = False
    """True where backwards come as I and W."""

    def __post_init__(self) -> None:
        at_least_one(f"schedule {self.name}", "chunks", self.chunks)
        if self.wiring == "v" and self.chunks != 2:
            raise ValueError(
                f"schedule {self.name} has {self.chunks} chunks with wiring 'v', which has two: "
                "give chunks=2, or wiring='loop'"
            )

    def __call__(self, rank: int, ranks: int, microbatches: int) -> list[Action]:
        """Actions of one rank. Raises ValueError for a rank or counts out of range."""
        at_least_one(f"schedule {self.name}", "ranks", ranks)
        at_least_one(f"schedule {self.name}", "microbatches", microbatches)
        if not isinstance(rank, Integral) or not 0 <= rank < ranks:
            raise ValueError(
                f"schedule {self.name}: rank is {rank!r}, but ranks count from 0: give one of 0 to "
                f"{ranks - 1}"
            )
        return self.order(rank, ranks, microbatches)

    def stage(self, rank: int, chunk: int, ranks: int) -> int:
        """Number of a rank's chunk along the whole model."""
        if self.wiring == "v":
            return rank if chunk == 0 else 2 * ranks - 1 - rank
        return chunk * ranks + rank

    def place(self, stage: int, ranks: int) -> tuple[int, int]:
        """(rank, chunk) of a stage: undoes ``stage``."""
        if self.wiring == "v":
            return (stage, 0) if stage < ranks else (2 * ranks - 1 - stage, 1)
        return stage % ranks, stage // ranks

    def neighbours(self, ranks: int) -> list[tuple[int, int]]:
        """Return (source, to) of all transfers between ranks, forwards and backwards, sorted."""
        places = [self.place(stage, ranks)[0] for stage in range(ranks * self.chunks)]
        pairs = {(a, b) for a, b in pairwise(places) if a != b}
        return sorted(pairs | {(b, a) for a, b in pairs})


def at_least_one(where: str, name: str, value: int) -> None:
    """Raise ValueError unless a count is a whole number from 1 up."""
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}: give a whole number of at least 1")


def as_schedule(schedule: Schedule | Order) -> Schedule:
    """A schedule of a plain function of (rank, ranks, micro-batches), which has one chunk.

    Raises ValueError for what is neither.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if not callable(schedule):
        raise ValueError(
            f"{schedule!r} is no schedule: give a Schedule, such as schedule_named('1f1b'), or a "
            "function of (rank, ranks, micro-batches)"
        )
    return Schedule(getattr(schedule, "__name__", "schedule"), schedule)


def rank_actions(
    schedule: Schedule | Order, n_ranks: int, n_microbatches: int
) -> list[list[Action]]:
    """Return the actions of every rank, which times do not change.

    Raises:
        ValueError: as ``simulate`` does for incomplete lists and for counts below 1.
    """
    schedule = as_schedule(schedule)
    at_least_one("simulate", "n_ranks", n_ranks)
    at_least_one("simulate", "n_microbatches", n_microbatches)
    lists = [schedule(rank, n_ranks, n_microbatches) for rank in range(n_ranks)]
    for rank, actions in enumerate(lists):
        check_complete(rank, actions, n_microbatches, schedule)
    return lists


def check_complete(
    rank: int, actions: Sequence[Action], n_microbatches: int, schedule: Schedule
) -> None:
    """Raise ValueError unless a rank does everything once, each kind in ascending order."""
    whole = list(range(n_microbatches))
    kinds = ("F", "I", "W") if schedule.splits else ("F", "B")
    found: dict[tuple[str, int], list[int]] = {
        (kind, chunk): [] for chunk in range(schedule.chunks) for kind in kinds
    }
    for action in actions:
        if (action.kind, action.chunk) not in found:
            raise ValueError(
                f"rank {rank} of schedule {schedule.name} runs {action}: it has kinds "
                f"{', '.join(kinds)} and {schedule.chunks} chunks"
            )
        found[action.kind, action.chunk].append(action.microbatch)
    for (kind, chunk), order in found.items():
        if order != whole:
            raise ValueError(
                f"rank {rank} runs {kind} of chunk {chunk} on micro-batches {order}: each of "
                f"{n_microbatches} must come once, in ascending order"
            )


def _gpipe(rank: int, ranks: int, microbatches: int) -> list[Action]:
    forwards = [Action("F", i) for i in range(microbatches)]
    return forwards + [Action("B", i) for i in range(microbatches)]


def _one_f_one_b(rank: int, ranks: int, microbatches: int) -> list[Action]:
    # Forwards until the first backward can arrive, then in turn, then the backwards that are left.
    warm_up = min(ranks - 1 - rank, microbatches)
    actions = [Action("F", i) for i in range(warm_up)]
    for i in range(warm_up, microbatches):
        actions += [Action("F", i), Action("B", i - warm_up)]
    return actions + [Action("B", i) for i in range(microbatches - warm_up, microbatches)]


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    # Groups of at least ``ranks`` micro-batches, where there are as many: a group passes through
    # all chunks before the next one begins.
    count = max(microbatches // ranks, 1)
    least, more = divmod(microbatches, count)
    starts = [g * least + min(g, more) for g in range(count + 1)]
    groups = [range(a, b) for a, b in pairwise(starts)]
    down = [Action("F", i, c) for group in groups for c in range(chunks) for i in group]
    up = [Action("B", i, c) for group in groups for c in reversed(range(chunks)) for i in group]
    # Forwards until this rank's first backward can arrive: the first group's in all chunks but the
    # last, and two for each later rank.
    warm_up = min(2 * (ranks - 1 - rank) + (chunks - 1) * len(groups[0]), len(down))
    actions = down[:warm_up]
    for forward, backward in zip(down[warm_up:], up, strict=False):
        actions += [forward, backward]
    return actions + up[len(down) - warm_up :]


def _zb_h1(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1F1B whose weight parts come ``rank`` micro-batches late: the later ranks fill their gaps."""
    warm_up, late = min(ranks - 1 - rank, microbatches), min(rank, microbatches)
    actions = [Action("F", i) for i in range(warm_up)]
    for i in range(microbatches):
        if warm_up + i < microbatches:
            actions.append(Action("F", warm_up + i))
        actions.append(Action("I", i))
        if i >= late:
            actions.append(Action("W", i - late))
    return actions + [Action("W", i) for i in range(microbatches - late, microbatches)]


def _zb_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    return [*_zb_v_actions(rank, ranks, microbatches)]


@cache
def _zb_v_actions(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    return tuple(Action(*step) for step in zb_v_lists(ranks, microbatches)[rank])


gpipe = Schedule("afab", _gpipe)
"""All forwards, then all backwards (Huang et al., arXiv 1811.06965).

Simple, and every micro-batch's activations live until the backwards begin.
"""

one_f_one_b = Schedule("1f1b", _one_f_one_b)
"""A few forwards, then forward and backward in turn (Narayanan et al., arXiv 2104.04473).

At most ``ranks - rank`` micro-batches are alive at once, whatever their number.
"""

zero_bubble_h1 = Schedule("zb-h1", _zb_h1, splits=True)
"""1F1B whose weight gradients wait for idle time: ZB-H1 of Qi et al., arXiv 2401.10241.

A third of 1F1B's bubble when F, I and W cost the same, and no rank has more micro-batches alive
than 1F1B's first.
"""

zero_bubble_v = Schedule("zb-v", _zb_v, chunks=2, wiring="v", splits=True)
"""Two chunks a rank, the second on the way back, so that the first rank has the loss: ZB-V.

(Qi et al., arXiv 2401.10241, section 6.) Hardly any bubble when F, I and W cost the same, at the
memory of 1F1B's first rank on every rank.
"""


def interleaved(chunks: int) -> Schedule:
    """1F1B over ``chunks`` small stages a rank (Narayanan et al., arXiv 2104.04473).

    The bubble is ``chunks`` times smaller than 1F1B's and there are as many times more transfers.
    Best where ranks divide the micro-batches; any number works. Raises ValueError below 1 chunk.
    """
    at_least_one("interleaved", "chunks", chunks)
    if chunks == 1:
        return one_f_one_b
    return Schedule(f"interleaved-{chunks}", partial(_interleaved, chunks=chunks), chunks)


SCHEDULES: dict[str, Schedule] = {
    "afab": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved(2),
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
}
"""By the names used in configuration files."""


def schedule_named(name: str, chunks: int | None = None) -> Schedule:
    """The schedule of a configuration file.

    ``chunks``: stages of each rank; None for the schedule's own, the only one that is right for
    any but ``interleaved``. Raises ValueError for an unknown name or a wrong number of chunks.
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    found = SCHEDULES[name]
    if name == "interleaved" and chunks is not None:
        return interleaved(chunks)
    if chunks not in (None, found.chunks):
        raise ValueError(
            f"schedule {name!r} has {found.chunks} chunks a rank, {chunks} were given: only "
            "interleaved takes a number"
        )
    return found
