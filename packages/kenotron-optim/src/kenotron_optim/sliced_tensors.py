"""Parameters of a stage of which each data rank owns a slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from kenotron_dist import Axis, Mesh
from kenotron_dist.placement import TensorLayout
from kenotron_optim.data_axes import data_axes
from kenotron_optim.partition import Bucket, Span


class SlicedTensors:
    """Parameters by path and by logical name, and who owns what of them.

    Args:
        parameters: of this stage, tied ones under each name.
        layouts: of these at least.
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
        self.mesh, self.shard_ranks = mesh, shard_ranks
        self.parameters = dict(parameters)
        self.owners: dict[str, list[str]] = {}
        """Logical name -> the parameters of this stage that are it, in the model's order."""
        for path in parameters:
            self.owners.setdefault(layouts[path].name, []).append(path)
        self.logical = {name: min(paths) for name, paths in self.owners.items()}
        self.name_of = {path: layouts[path].name for path in parameters}
        self.layouts = {name: layouts[path] for name, path in self.logical.items()}
        self.buckets: list[Bucket] = []
        self._span_of: dict[str, Span] = {}

    def place(self, buckets: Sequence[Bucket]) -> None:
        """Take the buckets of all tensors."""
        self.buckets = list(buckets)
        self._span_of = {span.name: span for bucket in buckets for span in bucket.spans}

    def spans(self) -> list[tuple[Bucket, Span]]:
        """Every logical tensor of this stage with its bucket."""
        return [(bucket, span) for bucket in self.buckets for span in bucket.spans]

    def owned_layout(self, name: str, rank: int | None = None) -> TensorLayout:
        """Layout of the slice of logical tensor ``name`` that a data rank owns (default: this)."""
        own = self.axis_of(name).rank if rank is None else rank
        block = self.shard_ranks if self.layouts[name].grid == "dense" else None
        return self.layouts[name].sliced(*self._span_of[name].owned(own), block=block)

    def axis_of(self, name: str) -> Axis:
        """The axis whose ranks own the slices of a logical tensor; gradients are summed over it."""
        axes = self.mesh.view(self.layouts[name]).data
        return data_axes(self.mesh, axes, self.shard_ranks).slices

    def tensor(self, name: str) -> nn.Parameter:
        """Return the parameter, of any shape, that is the logical tensor ``name``."""
        return self.parameters[self.logical[name]]

    def range_of(self, span: Span, rank: int) -> Tensor:
        """Return a rank's part of a parameter: (n,), a view; zeros where that has no memory."""
        parameter = self.tensor(span.name).detach()
        start, stop = span.owned(rank)
        if not parameter.untyped_storage().nbytes():
            return parameter.new_zeros(stop - start)
        return parameter.view(-1)[start:stop]


def joined(first: SlicedTensors, second: SlicedTensors) -> SlicedTensors:
    """Return the tensors of both, which are of one mesh and have no name in common."""
    both = SlicedTensors({}, {}, first.mesh, first.shard_ranks)
    for each in (first, second):
        for name in ("parameters", "owners", "logical", "name_of", "layouts"):
            getattr(both, name).update(getattr(each, name))
    both.place([*first.buckets, *second.buckets])
    return both
