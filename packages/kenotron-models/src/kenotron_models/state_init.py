"""First values of the constants of a state-space layer, which depend on their places only.

N features of a channel's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_dist.boxes import Box
from kenotron_dist.init import uniform_block
from kenotron_dist.placement import TensorLayout


@dataclass(frozen=True)
class LogOfPlace:
    """log(1 + i), i the place along the last dim: decays -1, -2, ..., -N (S4D-Real)."""

    def block(self, layout: TensorLayout, box: Box, *, seed: int) -> Tensor:
        """Return the values of a block; see ``kenotron_dist.init.Computed``."""
        first = box.start[-1]
        places = torch.arange(first + 1, first + box.shape[-1] + 1, dtype=torch.float32)
        return places.log().expand(box.shape)


@dataclass(frozen=True)
class LogOfDraw:
    """Logarithms of values drawn evenly between two bounds above 0."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""

    def block(self, layout: TensorLayout, box: Box, *, seed: int) -> Tensor:
        """Return the values of a block; see ``kenotron_dist.init.Computed``."""
        draws = uniform_block(layout.name, layout.shape, box, seed=seed)
        return (draws * (self.high - self.low) + self.low).log()


@dataclass(frozen=True)
class FirstSteps:
    """Biases whose softplus is a step, drawn between two bounds, evenly in its logarithm."""

    low: float
    """Smallest step."""
    high: float
    """Largest step."""
    floor: float
    """No step is below this."""

    def block(self, layout: TensorLayout, box: Box, *, seed: int) -> Tensor:
        """Return the values of a block; see ``kenotron_dist.init.Computed``."""
        draws = uniform_block(layout.name, layout.shape, box, seed=seed)
        low, high = math.log(self.low), math.log(self.high)
        steps = torch.exp(draws * (high - low) + low).clamp(min=self.floor)
        return steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus
