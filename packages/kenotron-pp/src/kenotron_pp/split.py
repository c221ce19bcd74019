"""Cut a list of layers into pipeline stages of nearly equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite

from torch import nn

from kenotron_pp.schedule import Schedule, at_least_one, one_f_one_b

NamedLayers = Sequence[tuple[str, nn.Module]]
"""Layers of a whole model in order, each with its global name."""


@dataclass(frozen=True)
class Stages:
    """Stage of each layer, and stages of each rank."""

    names: tuple[str, ...]
    """All layers in order."""
    ranges: tuple[range, ...]
    """Indices of every stage's layers; a rank has one stage for each chunk."""
    schedule: Schedule = one_f_one_b
    """Says how many chunks a rank has, and which."""

    @classmethod
    def balanced(
        cls,
        layers: NamedLayers,
        costs: Sequence[float],
        n_ranks: int,
        schedule: Schedule = one_f_one_b,
        *,
        first: float = 0.0,
        last: float = 0.0,
    ) -> Stages:
        """Cut by ``split_layers`` for all chunks of a schedule. Raises ValueError as it does."""
        at_least_one("Stages.balanced", "n_ranks", n_ranks)
        if len(costs) != len(layers):
            raise ValueError(f"{len(layers)} layers were given {len(costs)} costs: give each one")
        ranges = split_layers(costs, n_ranks * schedule.chunks, first=first, last=last)
        return cls(tuple(name for name, _ in layers), tuple(ranges), schedule)

    @classmethod
    def at(
        cls,
        layers: NamedLayers,
        starts: Sequence[int | str],
        schedule: Schedule = one_f_one_b,
    ) -> Stages:
        """Cut before the given layers, by index or name: one start less than there are stages.

        Raises ValueError when a name is unknown, when the starts do not ascend strictly within the
        layers, or when the number of stages is no multiple of the schedule's chunks.
        """
        names = tuple(name for name, _ in layers)
        unknown = [start for start in starts if isinstance(start, str) and start not in names]
        if unknown:
            raise ValueError(f"no layer {unknown[0]!r} to cut before: there are {', '.join(names)}")
        cuts = [names.index(start) if isinstance(start, str) else start for start in starts]
        ends = [0, *cuts, len(names)]
        if any(a >= b for a, b in pairwise(ends)):
            raise ValueError(
                f"cannot cut {len(names)} layers before {list(starts)}: cuts ascend, and every "
                "stage needs at least one layer"
            )
        if (len(cuts) + 1) % schedule.chunks:
            raise ValueError(
                f"{len(cuts) + 1} stages cannot be dealt to ranks with {schedule.chunks} chunks "
                f"each: schedule {schedule.name} needs a multiple of {schedule.chunks}"
            )
        return cls(names, tuple(range(a, b) for a, b in pairwise(ends)), schedule)

    @property
    def n_ranks(self) -> int:
        """Ranks that share the layers."""
        return len(self.ranges) // self.schedule.chunks

    def chunks(self, layers: NamedLayers, rank: int) -> list[list[tuple[str, nn.Module]]]:
        """The layers of each of a rank's chunks.

        Raises ValueError for a rank out of range and for other layers than were cut.
        """
        if rank not in range(self.n_ranks):
            raise ValueError(
                f"no stages for rank {rank!r}: {self.n_ranks} ranks share the layers, and count "
                "from 0"
            )
        if len(layers) != len(self.names):
            raise ValueError(
                f"{len(layers)} layers were given to stages of {len(self.names)}: give all layers "
                "of the model, on every rank"
            )
        stages = [
            self.schedule.stage(rank, chunk, self.n_ranks) for chunk in range(self.schedule.chunks)
        ]
        return [[layers[i] for i in self.ranges[stage]] for stage in stages]

    def own(self, layers: NamedLayers, rank: int) -> list[tuple[str, nn.Module]]:
        """All layers of a rank, chunk after chunk. Raises ValueError as ``chunks`` does."""
        return [layer for chunk in self.chunks(layers, rank) for layer in chunk]

    def of_parameter(self, path: str) -> int:
        """The rank that has the parameter with this global name.

        Raises ValueError when no layer's name begins it.
        """
        for stage, indices in enumerate(self.ranges):
            if any(path.startswith(f"{self.names[i]}.") for i in indices):
                return self.schedule.place(stage, self.n_ranks)[0]
        raise ValueError(f"parameter {path!r} belongs to no layer of {', '.join(self.names)}")


def split_layers(
    costs: Sequence[float], n_stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Consecutive layers for every stage, so that the most expensive stage is as cheap as can be.

    Exact, O(stages * layers^2).

    Args:
        costs: of each layer, not negative, in any unit.
        n_stages: number of stages.
        first, last: costs of the first and the last stage next to their layers (reading tokens; the
            loss).

    Returns:
        One non-empty range of layer indices a stage; among equally good cuts, the one whose earlier
        stages are larger.

    Raises:
        ValueError: there are fewer layers than stages, or a cost is negative or not finite.
    """
    n_layers = len(costs)
    if not n_layers:
        raise ValueError("there are no layers to cut: give at least one, with its cost")
    if n_stages not in range(1, n_layers + 1):
        raise ValueError(
            f"cannot cut {n_layers} layers in {n_stages} stages: every stage needs at least one "
            f"layer, choose 1 to {n_layers} stages"
        )
    ends = {"first": first, "last": last}
    for name, cost in {**{f"layer {i}": cost for i, cost in enumerate(costs)}, **ends}.items():
        if not 0 <= cost or not isfinite(cost):
            raise ValueError(f"cost of {name} is {cost}: give a finite number from 0 up")
    if not isfinite(sum(costs) + first + last):
        raise ValueError("the costs add up to infinity: give them in a larger unit")
    costs = [costs[0] + first, *costs[1:]]
    costs[-1] += last
    before = [0.0, *accumulate(costs)]  # before[i]: cost of layers 0..i-1
    worst = [before[end] for end in range(n_layers + 1)]  # of the first `end` layers in one stage
    starts: list[list[int]] = []
    for stage in range(1, n_stages):
        row, chosen = [0.0] * (n_layers + 1), [0] * (n_layers + 1)
        for end in range(stage + 1, n_layers + 1):
            cuts = ((max(worst[i], before[end] - before[i]), -i) for i in range(stage, end))
            row[end], cut = min(cuts)
            chosen[end] = -cut
        worst = row
        starts.append(chosen)
    ends = [n_layers]
    for chosen in reversed(starts):
        ends.insert(0, chosen[ends[0]])
    return [range(a, b) for a, b in pairwise([0, *ends])]
