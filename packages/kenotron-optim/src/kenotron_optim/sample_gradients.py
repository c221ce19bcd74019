"""Gradients that have the same bits on every layout: one of each sample, added in one tree.

Shapes: n samples of the global batch, R of them on this data rank, d data ranks, N elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from kenotron_dist import Mesh, all_to_all
from kenotron_dist.placement import TensorLayout
from kenotron_optim.accumulate import GradAccumulator, Slices
from kenotron_optim.checks import owners_of
from kenotron_optim.partition import Bucket, blocks, copy
from kenotron_optim.sample_tree import SampleTree, nodes_of


class SampleGradients(GradAccumulator):
    """Adds the gradients of the samples of a step in one binary tree. Collective over the mesh.

    Every backward has one sample, the same number on all data ranks, whose samples are consecutive;
    ``start`` is told how many. Sums are those of one process that has all samples, to the bit,
    whatever the number of data ranks and the order of backwards. Data ranks exchange the nodes of
    the tree that each has: one where R is a power of two, and 2 log2(R) at most. Each use of a tied
    tensor has a tree; the uses are added at the end.

    Next to the buffer of a ``GradAccumulator`` it keeps at most ``log2(R) + 2`` gradients of N
    elements. ZeRO stages 2 and 3 keep whole gradients, too: slices of all ranks' nodes are as many.

    Args:
        parameters: as in ``GradAccumulator``, and so are the following.
        layouts: of the whole model.
        mesh: cp is 1. Sums over tp are made in each backward: no placement is ``Partial``, and
            replicas of kv heads have the same gradients.
        fp32: sums in fp32; otherwise in each parameter's own dtype.
        bucket_mb: data ranks exchange buckets of about this many MiB.

    Raises:
        ValueError: as ``GradAccumulator``; more than one rank of cp, or a ``Partial`` placement.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, TensorLayout],
        mesh: Mesh,
        *,
        fp32: bool = True,
        bucket_mb: float | None = None,
    ) -> None:
        cut = {f"cp {mesh.sizes['cp']}"} if mesh.sizes["cp"] > 1 else set()
        for name, layout in layouts.items():
            cut |= {name for axis in layout.partial_axes if mesh.sizes[axis] > 1}
        if cut:
            raise ValueError(
                f"SampleGradients: {', '.join(sorted(cut))}: these sums over ranks are in no tree "
                "of samples; make them in each backward, or give a GradAccumulator"
            )
        names = {layout.name for layout in layouts.values()}  # no sum starts early
        super().__init__(parameters, layouts, mesh, fp32=fp32, bucket_mb=bucket_mb, irregular=names)
        self._trees: dict[str, SampleTree] = {}
        firsts = [(b, {s.name: self.logical[s.name] for s in b.spans}) for b in self.buckets]
        further = [
            (replace(bucket, spans=(replace(span, offset=0),)), {span.name: path})
            for bucket, span in self.spans()
            for path in owners_of(self.parameters, layouts)[span.name]
            if path != self.logical[span.name]
        ]
        self._exchanges = firsts + further
        """Buckets, with the parameter for each logical name: further ones of tied tensors last."""

    def start(self, backwards: int | None = None, *, zeroed: bool = False) -> None:
        """Forget the last step's gradients.

        Args:
            backwards: R, samples of this data rank in the step; None: no gradient may come.
            zeroed: refused.

        Raises:
            ValueError: a number below 1, or ``zeroed``.
        """
        if zeroed:
            raise ValueError("SampleGradients: zeroed=True adds without order: give a count alone")
        super().start(backwards)
        self._trees = {}

    def finish(self) -> Slices:
        """The whole batch's gradient, this rank's slices of it; see ``GradAccumulator.finish``."""
        if not self._open:
            raise RuntimeError("finish() was called before: a step begins with start()")
        self._open = False
        self._check_counts()
        sums: dict[str, Tensor] = {}
        for bucket, paths in self._exchanges:
            row = self._reduced(bucket, paths)
            for span in bucket.spans:
                part = slice(span.offset, span.offset + len(self._owned[span.name]))
                sums[paths[span.name]] = row[part]
        for name, own in self._owned.items():
            own.copy_(sums[self.logical[name]])
        self._sync.run_ties(lambda path, _: sums[path], self._write, ())
        return {name: own.float() for name, own in self._owned.items()}

    def take_products(self, paths: Iterable[str], *, anywhere: bool = False) -> list[str]:
        """Return no path: the gradient of each sample is a value of its own."""
        return []

    @torch.no_grad()
    def receive_gradient(self, path: str, gradient: Tensor) -> None:
        """Add the gradient of the next sample (any shape; for its hook)."""
        count = self._count(path)
        if self._backwards is None:
            raise RuntimeError(
                f"the gradient of {path} came after start() without a number: call "
                "start(backwards=...), the number of this rank's samples"
            )
        samples, first = self._samples()
        tree = self._trees.setdefault(path, SampleTree(samples))
        tree.add((0, first + count), gradient.to(self._places[self.name_of[path]][0].dtype))
        self._counted(path, count)

    def _samples(self) -> tuple[int, int]:
        """Samples of the global batch, and the number of this rank's first one."""
        data, own = self.mesh["dp"], self._backwards or 0
        return own * data.size, own * data.rank

    def _check_counts(self) -> None:
        """Raise RuntimeError for a parameter that some samples only have used."""
        for path, count in self._counts.items():
            if count not in (0, self._backwards):
                raise RuntimeError(
                    f"{path} has gradients of {count} of {self._backwards} samples: the tree of "
                    "samples needs one of each, or none at all"
                )

    def _write(self, name: str, gradient: Tensor) -> None:
        """Overwrite what this rank owns of a tied tensor by the sum of its uses (n,)."""
        self._owned[name].copy_(gradient)

    def _find_blocks(self, path: str, layout: TensorLayout, fp32: bool) -> None:
        """Find nothing: gradients are in trees until the step is over."""

    def _reduced(self, bucket: Bucket, paths: Mapping[str, str]) -> Tensor:
        """Sum the gradients of parameters, by logical name, over all samples. Collective over dp.

        One without gradients counts as zero. Returns what this rank owns of the bucket (width,).
        """
        data, (samples, _) = self.mesh["dp"], self._samples()
        each, dtype = samples // data.size, self._dtype_of(bucket)
        nodes = [nodes_of(r * each, (r + 1) * each, samples) for r in range(data.size)]
        own = nodes[data.rank]
        # Of each owner's slice, the nodes that this rank has.
        rows = torch.zeros(data.size, len(own), bucket.width, dtype=dtype, device=self.mesh.device)
        for span in bucket.spans:
            of_rank = self._trees.pop(paths[span.name], SampleTree(samples)).nodes
            for place, node in enumerate(own if of_rank else ()):
                copy(list(blocks(rows[:, place], span)), of_rank.pop(node))
        if not samples:
            return rows.new_zeros(bucket.width)
        # Every rank gets its slice of all nodes, and adds them in the tree.
        counts = [len(own)] * data.size, [len(sent) for sent in nodes]
        received, tree = all_to_all(rows.flatten(0, 1), data, *counts), SampleTree(samples)
        for node, row in zip(chain.from_iterable(nodes), received, strict=True):
            tree.add(node, row)
        (total,) = tree.nodes.values()
        return total

    def _dtype_of(self, bucket: Bucket) -> torch.dtype:
        """Return the dtype in which a bucket's gradients are added."""
        return self._places[bucket.spans[0].name][0].dtype
