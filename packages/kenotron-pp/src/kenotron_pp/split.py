"""Cut a list of layers into pipeline stages of nearly equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

NamedLayers = Sequence[tuple[str, nn.Module]]
"""Layers of a whole model in order, each with its global name."""


@dataclass(frozen=True)
class Stages:
    """Which stage has which layer."""

    names: tuple[str, ...]
    """All layers in order."""
    ranges: tuple[range, ...]
    """Indices of every stage's layers."""

    @classmethod
    def balanced(cls, layers: NamedLayers, costs: Sequence[float], n_stages: int) -> Stages:
        """Cut by ``split_layers``. Raises ValueError as it does."""
        return cls(tuple(name for name, _ in layers), tuple(split_layers(costs, n_stages)))

    def own(self, layers: NamedLayers, stage: int) -> list[tuple[str, nn.Module]]:
        """The layers of one stage."""
        return [layers[i] for i in self.ranges[stage]]

    def of_parameter(self, path: str) -> int:
        """The stage that has the parameter with this global name.

        Raises ValueError when no layer's name begins it.
        """
        for stage, indices in enumerate(self.ranges):
            if any(path.startswith(f"{self.names[i]}.") for i in indices):
                return stage
        raise ValueError(f"parameter {path!r} belongs to no layer of {', '.join(self.names)}")


def split_layers(costs: Sequence[float], n_stages: int) -> list[range]:
    """Consecutive layers for every stage, so that the most expensive stage is as cheap as can be.

    Arguments: the cost of each layer, not negative, in any unit; the number of stages. Returns one
    non-empty range of layer indices a stage; among equally good cuts, the one whose earlier stages
    are larger. Exact, O(stages * layers^2).

    Raises ValueError when there are fewer layers than stages or a cost is negative.
    """
    n_layers = len(costs)
    if n_stages < 1 or n_layers < n_stages:
        raise ValueError(
            f"cannot cut {n_layers} layers in {n_stages} stages: every stage needs at least one "
            f"layer, choose 1 to {n_layers} stages"
        )
    if min(costs) < 0:
        raise ValueError(f"cost of layer {costs.index(min(costs))} is {min(costs)}: it is negative")
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
    return [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]
