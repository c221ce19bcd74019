"""fp32 gradient buffers, filled by autograd hooks and reduced to the owners' slices.

Hooks move gradients to buffers and free them. Sums over data-parallel ranks start while the last
backward still runs, sums that other placements ask for in ``finish``."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from kenotron_dist import DATA_AXES, Mesh
from kenotron_dist.placement import TensorLayout
from kenotron_dist.weight_products import Factors, adds_in_fp32, current_backward
from kenotron_optim.bucket_order import order_buckets
from kenotron_optim.checks import (
    check_alike,
    check_backwards,
    check_count,
    check_known,
    check_parameters,
    frozen_ties,
)
from kenotron_optim.config import Reduce
from kenotron_optim.frozen_slices import FrozenSlices
from kenotron_optim.gradient_buffers import make_buffers
from kenotron_optim.gradient_hooks import GradientHooks
from kenotron_optim.partition import (
    Place,
    add,
    add_products,
    blocks,
    copy,
    matrices,
    read,
    shaped,
    write,
)
from kenotron_optim.sliced_tensors import SlicedTensors
from kenotron_optim.sync import GradientSync

Slices = dict[str, Tensor]
"""This rank's part of every gradient: logical name -> 1-D, fp32."""


class GradAccumulator(SlicedTensors):
    """Adds the gradients of all micro-batches of a step. Collective over the mesh.

    Args:
        parameters: this stage's parameters by their global names, tied ones under each name.
        layouts: layouts of the *whole* model's parameters, the same on every rank.
        mesh: gradients are summed over its data axes: dp and cp, or edp for experts.
        fp32: buffers in fp32; otherwise in each parameter's own dtype.
        bucket_mb: parameters are reduced in buckets of about this many MiB. None: 25 on a CPU, on
            an accelerator as many as keep its links busy (see ``make_buckets``).
        irregular: logical names of tensors that may get no gradient on some ranks. Their sums start
            in ``finish``, in one order on all ranks. None: all tensors of the expert grid.
        reduce: step: gradients of all micro-batches are added first, in buffers of their full size.
            micro_batch: those of each are reduced, and only this rank's slices are kept (ZeRO-2);
            not of partial and ``irregular`` tensors, and those that stages tie.
        shard_ranks: so many consecutive ranks of dp (each with its cp ranks) own slices; other
            blocks of them own the same, and sums run over these afterwards. None: all.

    Frozen parameters are in ``frozen``, of which ZeRO-3 keeps slices; one without a gradient counts
    as zero. The parameters' gradients go to the accumulator that was made last.

    Raises:
        ValueError: a parameter without a layout, of another shape or not contiguous, an unknown
            name in ``irregular``, a tie frozen in part, or data ranks that differ.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, TensorLayout],
        mesh: Mesh,
        *,
        fp32: bool = True,
        bucket_mb: float | None = None,
        irregular: Collection[str] | None = None,
        reduce: Reduce = "step",
        shard_ranks: int | None = None,
    ) -> None:
        check_parameters(parameters, layouts, mesh)
        tied = frozen_ties(parameters, layouts, mesh)
        check_known(layouts, irregular or ())
        learning = {path: p for path, p in parameters.items() if p.requires_grad}
        super().__init__(learning, layouts, mesh, shard_ranks)
        frozen = {path: p for path, p in parameters.items() if path not in learning}
        self.frozen = FrozenSlices(frozen, layouts, mesh, shard_ranks)
        self.names = sorted({layout.name for layout in layouts.values()})
        """Logical names of the whole model."""
        synced = {path: each for path, each in layouts.items() if each.name not in tied}
        self._sync = GradientSync(synced, self.logical, mesh)
        backward = {name: learning[path] for name, path in reversed(list(self.logical.items()))}
        experts = [layout.name for layout in layouts.values() if layout.grid == "expert"]
        added = [n for n in self._sync.pairs if reduce != "step" and self.axis_of(n).size > 1]
        late = self._sync.names.difference(added).union(experts if irregular is None else irregular)
        self.place(order_buckets(backward, self.layouts, mesh, late, bucket_mb, shard_ranks))
        self.peers = mesh[("dp", "cp", "tp") if experts else DATA_AXES["dense"]]
        """Ranks that must accumulate the same tensors: with experts the whole stage."""
        check_alike([(s.name, s.numel, str(b.dtype)) for b, s in self.spans()], self.peers)
        made = make_buffers(
            self.buckets,
            self.owners,
            mesh,
            late,
            reduce,
            self.peers,
            fp32=fp32,
            shard_ranks=shard_ranks,
        )
        self._sums, self._reduction, self._bucket_of = made.sums, made.reduction, made.number
        self.buffers, self._places = made.buffers, made.places
        """(d, width) by bucket: ``finish`` leaves sums in this rank's row. Meta for slices only."""
        self.slice_sums = made.sums.sums
        self._owned = {name: self._owned_view(name) for name in self.logical}
        self._seconds: dict[str, Tensor] = {}  # further owners of a tied tensor on this stage
        self._blocks: dict[str, list[Place]] = {}
        """Parts of buckets in which the gradient of each parameter is added up."""
        self._matrices: dict[str, list[Place]] = {}
        self._taken_in: dict[str, int] = {}
        self._open = False
        self._watchers: list[weakref.WeakMethod[Callable[[str], None]]] = []
        for path in self.parameters:
            self._find_blocks(path, layouts[path], fp32)
        self._hooks = GradientHooks(self, self.parameters)
        self.start()

    def start(self, backwards: int | None = None, *, zeroed: bool = False) -> None:
        """Forget the last step's gradients.

        ``zeroed``: fill the buffers with zeros, so that each gradient is added: what is captured
        once as a graph can be replayed for every micro-batch (``replayed``).

        ``backwards``: how many backward passes follow, in each with at most one gradient for a
        parameter: sums over data ranks start while the last of them runs, and else in ``finish``.
        Collective over the data axes after a step that was begun so and not finished. Raises
        ValueError unless it is a number from 1.
        """
        check_backwards(backwards)
        if self._open and self._backwards is not None:
            self._reduction.finish()  # some ranks may have started sums that others have not
        self._sums.start(backwards, unfinished=self._open)
        for parameter in self.parameters.values():
            parameter.grad = None
        self._counts = dict.fromkeys(self.parameters, 0)
        self._backwards, self._open, self._zeroed = backwards, True, zeroed
        if zeroed:
            if self._sums.sums:
                raise ValueError("zeroed=True keeps whole gradients: make it with reduce='step'")
            torch._foreach_zero_([*self.buffers, *self._seconds.values()])
        self._missing = Counter(self._bucket_of.values())
        self._reduction.start()

    def replayed(self, times: int) -> None:
        """Count gradients that a graph has added since ``start(zeroed=True)``."""
        self._counts = dict.fromkeys(self.parameters, times)

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
        self._sums.finish()
        self._reduction.start_early()  # before other sums, on ranks whose hooks did not fire, too
        self._sync.run(self._read, self._write, self._sums)
        self._reduction.finish()
        return {name: view.float() for name, view in self._owned.items()}

    def watch(self, told: weakref.WeakMethod[Callable[[str], None]]) -> None:
        """Call a method with the path of every parameter whose gradient was added."""
        self._watchers.append(told)

    def _owned_view(self, name: str) -> Tensor:
        """Return this data rank's part of a logical tensor, in its row of the buffer."""
        if name in self._sums:
            return self._sums.owned(name)
        (buffer, span), own = self._places[name], self.axis_of(name).rank
        start, stop = span.owned(own)
        return buffer[own, span.offset : span.offset + stop - start]

    def _find_blocks(self, path: str, layout: TensorLayout, fp32: bool) -> None:
        """Find where the gradient of a parameter is added up."""
        if self.logical[layout.name] == path or layout.name in self._sums:
            places = list(blocks(*self._places[layout.name]))
            self._blocks[path] = shaped(places, self.parameters[path])
        else:
            parameter = self.parameters[path]
            dtype = torch.float32 if fp32 else parameter.dtype
            self._seconds[path] = torch.zeros_like(parameter, dtype=dtype)
            self._blocks[path] = [(self._seconds[path], slice(None))]

    def receive_gradient(self, path: str, gradient: Tensor) -> None:
        """Add a gradient, of the parameter's own shape, to its buffer (for its hook)."""
        count, name = self._count(path), self.name_of[path]
        if name in self._sums:
            places, empty = self._sums.places(name, count)
            (copy if empty else add)(places, gradient)
        else:
            (add if count or self._zeroed else copy)(self._blocks[path], gradient)
        self._counted(path, count)

    def take_products(self, paths: Iterable[str], *, anywhere: bool = False) -> list[str]:
        """Let layers add weight-gradient products into the fp32 buffers, without a gradient.

        One kernel then reads the factors and updates the buffer, without a rounding to the
        parameter's dtype. Layers of kenotron-tp do so, but not within compiled programs.

        Args:
            paths: parameters that one layer uses, once in a backward pass; else a step that is
                started with ``backwards`` raises RuntimeError.
            anywhere: also where a device has no such kernel; CPUs have none.

        Returns:
            The paths that are taken: matrices with an fp32 buffer of which a data rank owns whole
            rows, and not too few.

        Raises:
            ValueError: this stage has no such parameter.
        """
        paths = list(paths)
        if unknown := sorted(set(paths) - self.parameters.keys()):
            raise ValueError(f"take_products: this stage has no learning parameters {unknown}")
        if not anywhere and not adds_in_fp32(self.mesh.device):
            return []
        found = {path: matrices(self._blocks[path], self.parameters[path]) for path in paths}
        taken = {path: parts for path, parts in found.items() if parts}
        self._matrices.update(taken)
        for path in taken:
            self._hooks.take(path, self.parameters[path])
        return list(taken)

    @torch.no_grad()
    def receive_products(self, path: str, products: Sequence[Factors]) -> None:
        """Add the products of a backward pass to a parameter's buffer (for its taker)."""
        count, name, places = self._count(path), self.name_of[path], self._matrices[path]
        replaces = not (count or self._zeroed)
        if name in self._sums:
            flat, replaces = self._sums.places(name, count)
            places = matrices(flat, self.parameters[path])
        add_products(places, products, replaces=replaces)
        self._taken_in[path] = current_backward()
        self._counted(path, count)

    def _count(self, path: str) -> int:
        """Count a parameter's gradients so far. Raises RuntimeError where one more is wrong."""
        count, backward = self._counts[path], current_backward()
        taken = backward >= 0 and self._taken_in.get(path) == backward
        check_count(path, count, self._backwards, is_open=self._open, taken=taken)
        return count

    def _counted(self, path: str, before: int) -> None:
        """Count a gradient that was added; a bucket that has all of its own may be reduced."""
        self._counts[path], name = before + 1, self.name_of[path]
        for watcher in self._watchers:
            if (told := watcher()) is not None:
                told(path)
        if name in self._sums:
            self._sums.arrived(name, path, before)
        elif before + 1 == self._backwards:
            bucket = self._bucket_of[name]
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                self._reduction.ready(bucket)

    def _read(self, path: str, layout: TensorLayout) -> Tensor:
        """The accumulated gradient of one owner, in the parameter's shape."""
        if path in self._seconds:
            return self._seconds[path]
        return read(*self._places[layout.name], self.parameters[path])

    def _write(self, name: str, gradient: Tensor) -> None:
        write(*self._places[name], gradient)
