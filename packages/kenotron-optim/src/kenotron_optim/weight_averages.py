"""An exponential moving average of the weights, over the slices that an optimizer updates.

It is elementwise and in fp32, so it has the same bits on every layout and ZeRO stage that has the
same weights. It begins with the weights of the first update that it takes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kenotron_dist.placement import TensorLayout
from kenotron_optim.accumulate import GradAccumulator
from kenotron_optim.sliced_optimizer import SlicedOptimizer
from kenotron_optim.weight_average_config import WeightAverageConfig

AVERAGE = "average"
"""Second word of the averages' logical names: ``optimizer.average.<parameter>``."""


class WeightAverages:
    """Average the weights of an optimizer, 4 bytes for each element that a rank updates.

    With offload averages are in host memory, too, and averaged there.

    Args:
        optimizer: has the masters.
        accumulator: knows their layouts.
        config: how the average is taken.
    """

    def __init__(
        self, optimizer: SlicedOptimizer, accumulator: GradAccumulator, config: WeightAverageConfig
    ) -> None:
        self.config, self._optimizer = config, optimizer
        self._averages = {
            piece: torch.zeros_like(master) for piece, master in optimizer.kept_masters().items()
        }
        self._layouts = {
            (name, rank): accumulator.owned_layout(name, rank).renamed(
                f"optimizer.{AVERAGE}.{name}"
            )
            for name, rank in self._averages
        }
        self._own = [each for each in self._layouts if each[1] == accumulator.axis_of(each[0]).rank]
        """Pieces of this data rank; with stage 0 it has those of others, too."""
        self._has_begun = False

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights of the update that was just made; not for one that was left out."""
        if self._optimizer.steps % self.config.every:
            return
        if not self._has_begun:
            self.begin()
        elif self._averages:
            masters = list(self._optimizer.kept_masters().values())
            torch._foreach_lerp_(list(self._averages.values()), masters, 1 - self.config.decay)

    @torch.no_grad()
    def begin(self) -> None:
        """Forget what was averaged: the average is the weights of now."""
        self._has_begun = True
        self._copy()

    def forget(self) -> None:
        """Begin with the next update that is taken in."""
        self._has_begun = False

    @torch.no_grad()
    def _copy(self) -> None:
        for piece, master in self._optimizer.kept_masters().items():
            self._averages[piece].copy_(master)

    def state(self) -> dict[str, tuple[Tensor, TensorLayout]]:
        """Return this rank's flat slices as logical tensors, for checkpoints: live, no copies.

        Before the first update that is taken in there are none: a run that resumes then begins
        with the same update as one that was not stopped.
        """
        if not self._has_begun:
            return {}
        own = [(self._averages[piece], self._layouts[piece]) for piece in self._own]
        return {layout.name: (average, layout) for average, layout in own}

    def wanted(self) -> dict[str, tuple[Tensor, TensorLayout]]:
        """Return every flat slice that this rank holds, to be overwritten when state is loaded."""
        self._has_begun = True
        return {
            f"{AVERAGE}.{name}.{rank}": (self._averages[name, rank], layout)
            for (name, rank), layout in self._layouts.items()
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the averages within the context. Collective over data axes.

        Afterwards the weights have their bits again.
        """
        if not self._has_begun:
            self._copy()
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self._optimizer.settle()
        for piece, master in self._optimizer.kept_masters(writes=True).items():
            held = master.clone()
            master.copy_(self._averages[piece])
            self._averages[piece].copy_(held)
        self._optimizer.publish()
