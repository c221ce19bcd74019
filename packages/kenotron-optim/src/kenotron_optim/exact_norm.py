"""A gradient norm in whole numbers, whose sum has no order: the same bits on every layout.

Shapes: T logical tensors of the whole model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kenotron_dist import all_reduce
from kenotron_optim.accumulate import GradAccumulator, Slices
from kenotron_optim.clip import GlobalNorm, largest_of

_CHUNK = 1 << 16
"""Elements that are squared at a time: their fp64 values stay in the cache."""


class ExactNorm(GlobalNorm):
    """The 2-norm of the gradient of a whole model, the same bits however slices are cut.

    The square of an fp32 number is exact in fp64. In units of the largest square of its tensor, a
    power of two, it is cut in two whole numbers of b bits each, which are added as int64; so
    ``n 2^(-2b)`` is the largest relative error of a tensor of n elements, at b = 62 - log2(n).
    Two collectives: the largest elements (T,), then the sums (T, 2).

    Args:
        accumulator: its slices are measured.
    """

    def __init__(self, accumulator: GradAccumulator) -> None:
        super().__init__(accumulator)
        numel = {layout.name: math.prod(layout.shape) for layout in accumulator.layouts.values()}
        own = torch.zeros(len(self.names), dtype=torch.int64, device=self.mesh.device)
        for name, n in numel.items():
            own[self.names.index(name)] = 62 - max(n - 1, 1).bit_length()
        self._bits = all_reduce(own, self.mesh.world, op="max")
        """Bits of a word by tensor (T,)."""

    def _powers(self, slices: Slices) -> Tensor:
        """Sum of the squares of each logical tensor (T,) fp64. Collective over the mesh."""
        views = [(self.names.index(v[0]), self._view(slices, *v).flatten()) for v in self._views]
        largest = self._bits.new_zeros(len(self.names), dtype=torch.float64)
        for row, view in views:
            largest[row] = torch.maximum(largest[row], view.abs().amax().double())
        largest = largest_of(largest, self.mesh.world)
        # A power of two that is no smaller than any element; of zeros, nan and inf there is none.
        usable = largest.isfinite() & (largest > 0)
        unit = _power_of_two(torch.frexp(largest.where(usable, 1.0)).exponent)
        words = self._bits.new_zeros(len(self.names), 2)
        scale = _power_of_two(self._bits)
        for row, view in views:
            for part in view.split(_CHUNK):
                square = (part.double() / unit[row]).square_().mul_(scale[row])
                high = square.floor()
                low = square.sub_(high).mul_(scale[row])
                words[row] += torch.stack([high.sum(dtype=torch.int64), low.sum(dtype=torch.int64)])
        high, low = all_reduce(words, self.mesh.world).double().unbind(1)
        total = (high + low / scale) / scale * unit.square()
        return total.where(usable, largest)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to whole numbers (T,), exactly, in fp64."""
    return (exponent.long() + 1023 << 52).view(torch.float64)
