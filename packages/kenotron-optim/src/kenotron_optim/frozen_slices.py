"""Slices of parameters that do not learn, such as the base of adapters (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout
from kenotron_optim.bucket_order import order_buckets
from kenotron_optim.sliced_tensors import SlicedTensors
from kenotron_optim.units import is_small


def zero3_cuts(parameter: Tensor, *, learns: bool) -> bool:
    """Return whether data ranks share a parameter, of any shape, with ZeRO stage 3.

    They share all that learn, and frozen matrices. Frozen vectors stay whole: a program may change
    them between steps (the bias of a router), and they are few bytes.
    """
    return learns or (parameter.is_floating_point() and not is_small(parameter))


class FrozenSlices(SlicedTensors):
    """Slices that a data rank owns of the frozen matrices of its stage.

    Args:
        parameters: of this stage that do not learn, by path.
        layouts: of the whole model.
        mesh: the mesh.
        shard_ranks: see ``data_axes``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, TensorLayout],
        mesh: Mesh,
        shard_ranks: int | None,
    ) -> None:
        cut = {path: p for path, p in parameters.items() if zero3_cuts(p, learns=False)}
        super().__init__(cut, layouts, mesh, shard_ranks)
        tensors = {name: cut[path] for name, path in reversed(list(self.logical.items()))}
        self.place(order_buckets(tensors, self.layouts, mesh, (), None, shard_ranks))
        self.values: dict[tuple[str, int], Tensor] = {}
        """This rank's slices (n,), in the dtype of their parameters, by (logical name, data rank);
        ``take`` fills them."""

    @torch.no_grad()
    def take(self, names: Iterable[str]) -> None:
        """Keep what this rank owns of some tensors, among others; zeros where one has no memory."""
        wanted = {*names}
        for _, span in self.spans():
            rank = self.axis_of(span.name).rank
            own = self.range_of(span, rank)
            if span.name in wanted and own.numel():
                self.values[span.name, rank] = own.clone()

    def take_again(self) -> None:
        """Take the values that parameters have now, of those that were taken before."""
        self.take([name for name, _ in self.values])

    def slices(self) -> dict[str, tuple[Tensor, TensorLayout]]:
        """Return ``values`` by logical name, live, with their layouts."""
        return {
            name: (own, self.owned_layout(name, rank)) for (name, rank), own in self.values.items()
        }
