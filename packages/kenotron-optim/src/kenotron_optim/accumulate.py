"""fp32 gradient buffers, filled by autograd hooks and reduced to the owners' slices.

The pipeline only calls ``backward``: a hook on every parameter moves its gradient to a buffer and
frees it. Sums over data-parallel ranks start while the last backward still runs, sums that other
placements ask for in ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from kenotron_dist import Mesh, TensorLayout
from kenotron_optim.checks import check_alike, check_parameters, frozen_ties
from kenotron_optim.partition import (
    Bucket,
    Place,
    Span,
    add,
    blocks,
    copy,
    make_buckets,
    read,
    write,
)
from kenotron_optim.reduction import Reduction
from kenotron_optim.sync import GradientSync

Slices = dict[str, Tensor]
"""This data-parallel rank's part of every gradient: logical name -> 1-D, fp32."""

DATA = ("dp", "cp")
_HOOKS = WeakTensorKeyDictionary()
"""The hook of every parameter that is accumulated."""


class GradAccumulator:
    """Adds the gradients of all micro-batches of a step.

    Arguments:
        parameters: this stage's parameters by their global names, tied ones under each name.
        layouts: layouts of the *whole* model's parameters, the same on every rank.
        mesh: the mesh; gradients are summed over dp and cp.
        fp32: buffers in fp32; otherwise in each parameter's own dtype.
        bucket_mb: parameters are reduced in buckets of about this many MiB.
        whole: logical names of tensors that one data rank owns altogether, for optimizers that
            need whole matrices (Muon); all others are cut in a slice for each rank.

    Frozen parameters are left out; one that gets no gradient has a zero one. An accumulator that is
    made later over the same parameters takes their gradients. Raises ValueError for a parameter
    without a layout, of another shape or not contiguous, a name in ``whole`` that the model has
    not, a tie of which a part is frozen, and for data ranks that differ. Collective over the mesh.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, TensorLayout],
        mesh: Mesh,
        *,
        fp32: bool = True,
        bucket_mb: float = 25,
        whole: Collection[str] = (),
    ) -> None:
        check_parameters(parameters, layouts, mesh)
        frozen = frozen_ties(parameters, layouts, mesh)
        parameters = {path: p for path, p in parameters.items() if p.requires_grad}
        strange = sorted(set(whole) - {layout.name for layout in layouts.values()})
        if strange:
            raise ValueError(f"whole: the model has no tensors {strange}: give logical names")
        self.mesh, self.data = mesh, mesh[DATA]
        self.parameters = parameters
        self.logical = _first_owners(parameters, layouts)
        self.layouts = {name: layouts[path] for name, path in self.logical.items()}
        self.whole = frozenset(whole)
        self.names = sorted({layout.name for layout in layouts.values()})
        """Logical names of the whole model, the same list on every rank."""
        learning = {path: each for path, each in layouts.items() if each.name not in frozen}
        self._sync = GradientSync(learning, self.logical, mesh)
        self.buckets = self._make_buckets(bucket_mb * 2**20, whole)
        described = [(s.name, s.numel, s.owner, str(b.dtype)) for b, s in self.spans()]
        check_alike(described, self.data)
        self.buffers = [
            bucket.buffer(torch.float32 if fp32 else bucket.dtype, mesh.device)
            for bucket in self.buckets
        ]
        """For each bucket (d, width): after ``finish`` this rank's row has the sums."""
        self._places = {
            span.name: (buffer, span)
            for bucket, buffer in zip(self.buckets, self.buffers, strict=True)
            for span in bucket.spans
        }
        self._seconds: dict[str, Tensor] = {}  # further owners of a tied tensor on this stage
        self._blocks: dict[str, list[Place]] = {}
        """Where the gradient of each parameter is added up."""
        early = [self._sync.names.isdisjoint(s.name for s in b.spans) for b in self.buckets]
        self._reduction = Reduction(self.buffers, self.data, sum(early))
        self._bucket_of = {
            span.name: i for i, bucket in enumerate(self.buckets) for span in bucket.spans
        }
        self._counts: dict[str, int] = {}
        """Gradients that each parameter got in this step."""
        self._backwards: int | None = None
        self._open = False
        for path, parameter in self.parameters.items():
            if parameter in _HOOKS:
                _HOOKS[parameter].remove()  # an earlier accumulator's: the last one counts
            hook = self._hook(path, layouts[path], fp32)
            _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(hook)
        self.start()

    def start(self, backwards: int | None = None) -> None:
        """Forget the last step's gradients.

        ``backwards``: how many backward passes follow, in each of which a parameter gets at most
        one gradient. Sums over data ranks then start while the last of them runs; without it they
        start in ``finish``. Collective over dp and cp after a step that was begun so and not
        finished. Raises ValueError unless it is a number from 1.
        """
        if backwards is not None and (not isinstance(backwards, int) or backwards < 1):
            raise ValueError(f"backwards is {backwards!r}: give the number of backwards, from 1")
        if self._open and self._backwards is not None:
            self._reduction.finish()  # some ranks may have started sums that others have not
        for parameter in self.parameters.values():
            parameter.grad = None
        self._counts = dict.fromkeys(self.parameters, 0)
        self._backwards, self._open = backwards, True
        self._missing = [len(bucket.spans) for bucket in self.buckets]
        self._reduction.start()

    def finish(self) -> Slices:
        """The whole batch's gradient, reduced to the slices that this rank owns (fp32).

        Collective over the mesh. Sums over axes where placements say ``Partial``, over replicas of
        kv heads, over the owners of tied tensors and over data-parallel ranks. The slices are
        views of the buffers: valid, and yours to change, until ``start``. Raises RuntimeError when
        they were made before.
        """
        if not self._open:
            raise RuntimeError("finish() was called before: a step begins with start()")
        self._open = False
        for path, count in self._counts.items():
            if not count:
                for view, _ in self._blocks[path]:
                    view.zero_()
        self._sync.run(self._read, self._write)
        slices: Slices = {}
        for bucket, row in zip(self.buckets, self._reduction.finish(), strict=True):
            for span in bucket.spans:
                start, stop = span.owned(self.data.rank)
                slices[span.name] = row[span.offset : span.offset + stop - start].float()
        return {name: slices[name] for name in self.logical}

    def spans(self) -> list[tuple[Bucket, Span]]:
        """Every logical tensor of this stage with its bucket."""
        return [(bucket, span) for bucket in self.buckets for span in bucket.spans]

    def owned_layout(self, name: str, rank: int | None = None) -> TensorLayout:
        """Layout of the slice of logical tensor ``name`` that a data rank owns (default: this)."""
        _, span = self._places[name]
        return self.layouts[name].sliced(*span.owned(self.data.rank if rank is None else rank))

    def _make_buckets(self, cap_bytes: float, whole: Collection[str]) -> list[Bucket]:
        """Buckets in the order of backward; first those that need no other sum."""
        tensors = {
            name: self.parameters[path] for name, path in reversed(list(self.logical.items()))
        }
        late = {name: x for name, x in tensors.items() if name in self._sync.names}
        early = {name: x for name, x in tensors.items() if name not in late}
        ranks = self.data.size
        return [
            bucket
            for group in (early, late)
            for bucket in make_buckets(group, ranks, cap_bytes, whole)
        ]

    def _hook(self, path: str, layout: TensorLayout, fp32: bool) -> Callable[[Tensor], None]:
        if self.logical[layout.name] == path:
            places = list(blocks(*self._places[layout.name]))
        else:
            parameter = self.parameters[path]
            dtype = torch.float32 if fp32 else parameter.dtype
            self._seconds[path] = torch.zeros_like(parameter, dtype=dtype)
            places = [(self._seconds[path], slice(None))]
        self._blocks[path] = places
        bucket = self._bucket_of[layout.name]

        def accumulate(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            if not self._open:
                parameter.grad = None
                raise RuntimeError(
                    f"parameter {path!r} got a gradient after finish(): a step begins with start()"
                )
            count = self._counts[path]
            if self._backwards is not None and count >= self._backwards:
                parameter.grad = None
                raise RuntimeError(
                    f"parameter {path!r} got gradient number {count + 1}, but "
                    f"start(backwards={self._backwards}) promised at most {self._backwards}: its "
                    "sum may be under way; give the number of backward passes, or none"
                )
            (add if count else copy)(places, gradient)
            parameter.grad = None
            self._counts[path] = count + 1
            if count + 1 == self._backwards:
                self._missing[bucket] -= 1
                if not self._missing[bucket]:
                    self._reduction.ready(bucket)

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


def _first_owners(
    parameters: Mapping[str, nn.Parameter], layouts: Mapping[str, TensorLayout]
) -> dict[str, str]:
    """Logical name -> the parameter of this stage that stands for it, in the model's order."""
    found: dict[str, str] = {}
    for path in parameters:
        name = layouts[path].name
        found[name] = min(found.get(name, path), path)
    return found
