"""fp32 gradient buffers, filled by autograd hooks and reduced to the owners' slices.

The pipeline only calls ``backward``: a hook on every parameter adds its gradient to a buffer and
frees it. ``finish`` makes the sums that placements ask for and reduces over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from kenotron_dist import Mesh, TensorLayout, reduce_scatter
from kenotron_optim.partition import Bucket, Place, Span, add, blocks, make_buckets, read, write
from kenotron_optim.sync import GradientSync

Slices = dict[str, Tensor]
"""This data-parallel rank's part of every gradient: logical name -> 1-D, fp32."""

DATA = ("dp", "cp")


class GradAccumulator:
    """Adds the gradients of all micro-batches of a step.

    Arguments:
        parameters: this stage's parameters by their global names, tied ones under each name.
        layouts: layouts of the *whole* model's parameters, the same on every rank.
        mesh: the mesh; gradients are summed over dp and cp.
        fp32: buffers in fp32; otherwise in each parameter's own dtype.
        bucket_mb: parameters are reduced in buckets of about this many MiB.

    Frozen parameters are left out; one that gets no gradient has a zero one. Raises ValueError for
    a parameter without a layout. Collective: sums over ties and kv heads make their groups here.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, TensorLayout],
        mesh: Mesh,
        *,
        fp32: bool = True,
        bucket_mb: float = 25,
    ) -> None:
        parameters = _trainable(parameters, layouts)
        unknown = sorted(set(parameters) - set(layouts))
        if unknown:
            raise ValueError(f"no layout for parameters {unknown}: layouts are of the whole model")
        self.mesh, self.data = mesh, mesh[DATA]
        self.parameters = parameters
        self.logical = _first_owners(parameters, layouts)
        self.layouts = {name: layouts[path] for name, path in self.logical.items()}
        self.names = sorted({layout.name for layout in layouts.values()})
        """Logical names of the whole model, the same list on every rank."""
        tensors = {name: parameters[path] for name, path in self.logical.items()}
        self.buckets = make_buckets(tensors, self.data.size, bucket_mb * 2**20)
        self._buffers = [
            bucket.buffer(torch.float32 if fp32 else bucket.dtype, mesh.device)
            for bucket in self.buckets
        ]
        self._places = {
            span.name: (buffer, span)
            for bucket, buffer in zip(self.buckets, self._buffers, strict=True)
            for span in bucket.spans
        }
        self._seconds: dict[str, Tensor] = {}  # further owners of a tied tensor on this stage
        for path, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(path, layouts[path], fp32))
        self._sync = GradientSync(layouts, self.logical, mesh)

    def start(self) -> None:
        """Forget the last step's gradients."""
        for buffer in (*self._buffers, *self._seconds.values()):
            buffer.zero_()

    def finish(self) -> Slices:
        """The whole batch's gradient, reduced to the slices that this rank owns (fp32).

        Collective over the mesh. Sums over axes where placements say ``Partial``, over replicas of
        kv heads, over the owners of tied tensors and over data-parallel ranks.
        """
        self._sync.run(self._read, self._write)
        handles = [reduce_scatter(buffer, self.data, async_op=True) for buffer in self._buffers]
        slices: Slices = {}
        for bucket, handle in zip(self.buckets, handles, strict=True):
            row = handle.wait()[0]
            for span in bucket.spans:
                start, stop = span.owned(self.data.rank)
                slices[span.name] = row[span.offset : span.offset + stop - start].float()
        return slices

    def spans(self) -> list[tuple[Bucket, Span]]:
        """Every logical tensor of this stage with its bucket."""
        return [(bucket, span) for bucket in self.buckets for span in bucket.spans]

    def owned_layout(self, name: str, rank: int | None = None) -> TensorLayout:
        """Layout of the slice of logical tensor ``name`` that a data rank owns (default: this)."""
        _, span = self._places[name]
        return self.layouts[name].sliced(*span.owned(self.data.rank if rank is None else rank))

    def _hook(self, path: str, layout: TensorLayout, fp32: bool) -> Callable[[Tensor], None]:
        if self.logical[layout.name] == path:
            places: list[Place] = list(blocks(*self._places[layout.name]))
        else:
            parameter = self.parameters[path]
            dtype = torch.float32 if fp32 else parameter.dtype
            self._seconds[path] = torch.zeros_like(parameter, dtype=dtype)
            places = [(self._seconds[path], slice(None))]

        def accumulate(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None:
                add(places, gradient)
                parameter.grad = None

        return accumulate

    def _read(self, path: str, layout: TensorLayout) -> Tensor:
        """The accumulated gradient of one owner, in the parameter's shape."""
        if path in self._seconds:
            return self._seconds[path]
        buffer, span = self._places[layout.name]
        out = torch.empty_like(self.parameters[path], dtype=buffer.dtype)
        read(buffer, span, out)
        return out

    def _write(self, name: str, gradient: Tensor) -> None:
        write(*self._places[name], gradient)


def _trainable(
    parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, TensorLayout]
) -> dict[str, nn.Parameter]:
    """Parameters that want a gradient; a tied tensor must be frozen under all names or none."""
    frozen = {path for path, p in parameters.items() if not p.requires_grad}
    for path in sorted(frozen & set(layouts)):
        learning = (set(layouts[path].owners) & set(parameters)) - frozen
        if learning:
            raise ValueError(
                f"{path!r} is frozen, but it is tied to {min(learning)!r}, which is not: freeze "
                "all owners or none"
            )
    return {path: p for path, p in parameters.items() if path not in frozen}


def _first_owners(
    parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, TensorLayout]
) -> dict[str, str]:
    """Logical name -> the parameter of this stage that stands for it, in the model's order."""
    found: dict[str, str] = {}
    for path in parameters:
        name = layouts[path].name
        found[name] = min(found.get(name, path), path)
    return found
