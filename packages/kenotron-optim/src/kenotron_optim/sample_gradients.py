"""Gradients that have the same bits on every layout: one of each sample, added in one tree.

Shapes: R samples of this data rank, d ranks that own slices, N elements.
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
from kenotron_optim.gradient_hooks import receive_uses
from kenotron_optim.partition import Bucket, blocks, copy
from kenotron_optim.sample_leaves import SampleLeaves
from kenotron_optim.sample_tree import SampleTree


class SampleGradients(GradAccumulator):
    """Adds the gradients of the samples of a step in one binary tree. Collective over the mesh.

    Every backward has one sample, the same number on all data ranks, whose samples are consecutive;
    ``start`` is told how many. Sums are those of one process that has all samples, to the bit,
    whatever the number of data ranks and the order of backwards. Data ranks exchange the nodes of
    the tree that each has: one where R is a power of two, and 2 log2(R) at most. Each use of a tied
    tensor has a tree; the uses are added at the end.

    With ``chunks`` above 1 a leaf is a virtual chunk of a sample, of which a rank of cp has
    ``chunks / cp``; layers hand each over by itself.

    Experts that are cut over ep have the tokens of several ranks in a backward: layers hand the
    gradient of each rank's over by itself (``kenotron_dist.separate_uses``), in the order of ranks.
    With ``shards`` above 1 a leaf of theirs has the tokens of a virtual shard of tp, of which a
    rank has ``shards / tp`` of each chunk.

    Next to the buffer of a ``GradAccumulator`` it keeps at most ``log2(R) + 2`` gradients of N
    elements, times ``chunks / cp``, and of experts times ``shards / tp``. ZeRO stages 2 and 3 keep
    whole gradients, too: slices of all ranks' nodes are as many.

    Args:
        parameters: as in ``GradAccumulator``, and so are the following.
        layouts: of the whole model.
        mesh: cp divides ``chunks``. Sums over tp are made in each backward: no placement is
            ``Partial``, and replicas of kv heads have the same gradients.
        fp32: sums in fp32; otherwise in each parameter's own dtype.
        bucket_mb: data ranks exchange buckets of about this many MiB.
        chunks: virtual chunks of a sample.
        shards: virtual shards of tp, over which the tokens of experts are cut.

    Raises:
        ValueError: as ``GradAccumulator``; chunks that cp does not divide, shards that tp does not
            divide where there are experts, or a ``Partial`` placement.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layouts: Mapping[str, TensorLayout],
        mesh: Mesh,
        *,
        fp32: bool = True,
        bucket_mb: float | None = None,
        chunks: int = 1,
        shards: int = 1,
    ) -> None:
        cp, tp = mesh.sizes["cp"], mesh.sizes["tp"]
        cut = {f"cp {cp} with chunks {chunks}"} if chunks % cp else set()
        if shards % tp and any(layout.grid == "expert" for layout in layouts.values()):
            cut.add(f"tp {tp} with shards {shards}")
        for name, layout in layouts.items():
            cut |= {name for axis in layout.partial_axes if mesh.sizes[axis] > 1}
        if cut:
            raise ValueError(
                f"SampleGradients: {', '.join(sorted(cut))}: these sums over ranks are in no tree "
                "of samples; make them in each backward, or give a GradAccumulator"
            )
        names = {layout.name for layout in layouts.values()}  # no sum starts early
        self._chunks, self._shards = chunks, shards
        super().__init__(parameters, layouts, mesh, fp32=fp32, bucket_mb=bucket_mb, irregular=names)
        self._trees: dict[str, SampleTree] = {}
        self._uses: dict[str, int] = {}
        """By path: gradients of separate uses so far in a backward pass that is not over."""
        receive_uses(self, self.parameters)
        firsts = [(b, {s.name: self.logical[s.name] for s in b.spans}) for b in self.buckets]
        further = [
            (replace(bucket, spans=(replace(span, offset=0),)), {span.name: path})
            for bucket, span in self.spans()
            for path in self.owners[span.name]
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
        self._trees, self._uses = {}, {}

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
        if (uses := self._uses_of(path)) > 1:
            raise RuntimeError(
                f"the gradient of {path} came as one sum, but {uses} leaves of the tree use it in "
                "a backward pass: let its layer take kenotron_dist.separate_uses of it"
            )
        self.receive_use(path, 0, gradient)

    @torch.no_grad()
    def receive_use(self, path: str, number: int, gradient: Tensor) -> None:
        """Add the gradient of one leaf of the next backward pass (any shape; for its hook).

        Leaves of one source rank after the other are numbered, those of a rank in their order.
        """
        count = self._count(path)
        if self._backwards is None:
            raise RuntimeError(
                f"the gradient of {path} came after start() without a number: call "
                "start(backwards=...), the number of this rank's samples"
            )
        leaves, sources = self._leaves(path), self._sources_of(path)
        source, use = divmod(number, leaves.uses)
        leaf = leaves.number(sources[source], use, count)
        tree = self._trees.setdefault(path, SampleTree(leaves.total))
        tree.add((0, leaf), gradient.to(self._places[self.name_of[path]][0].dtype))
        self._uses[path] = self._uses.get(path, 0) + 1
        if self._uses[path] == self._uses_of(path):
            self._uses[path] = 0
            self._counted(path, count)

    def _leaves(self, path: str) -> SampleLeaves:
        """Return the leaves of the step that a parameter has."""
        dp, cp, tp = (self.mesh.sizes[name] for name in ("dp", "cp", "tp"))
        leaves = SampleLeaves(
            self._backwards or 0, dp=dp, cp=cp, tp=tp, chunks=self._chunks, shards=self._shards
        )
        return leaves.of_experts if self._of_experts(path) else leaves

    def _of_experts(self, path: str) -> bool:
        return self.layouts[self.name_of[path]].grid == "expert"

    def _sources_of(self, path: str, rank: int | None = None) -> range:
        """Return the sources (``SampleLeaves``) of a gradient, on an owner of its slices.

        Args:
            path: of the parameter.
            rank: of the owner; None: this one.
        """
        each = self.mesh.config.ep if self._of_experts(path) else 1
        first = (self.axis_of(self.name_of[path]).rank if rank is None else rank) * each
        return range(first, first + each)

    def _uses_of(self, path: str) -> int:
        """Return the leaves that a backward pass has of a parameter."""
        return len(self._sources_of(path)) * self._leaves(path).uses

    def _check_counts(self) -> None:
        """Raise RuntimeError for a parameter that some samples only have used."""
        for path, count in self._counts.items():
            if count not in (0, self._backwards):
                raise RuntimeError(
                    f"{path} has gradients of {count} of {self._backwards} samples: the tree of "
                    "samples needs one of each, or none at all"
                )
            if self._uses.get(path):
                raise RuntimeError(
                    f"{path} has gradients of {self._uses[path]} of {self._uses_of(path)} leaves "
                    "of a backward pass: the tree of samples needs one of each"
                )

    def _write(self, name: str, gradient: Tensor) -> None:
        """Overwrite what this rank owns of a tied tensor by the sum of its uses (n,)."""
        self._owned[name].copy_(gradient)

    def _find_blocks(self, path: str, layout: TensorLayout, fp32: bool) -> None:
        """Find nothing: gradients are in trees until the step is over."""

    def _reduced(self, bucket: Bucket, paths: Mapping[str, str]) -> Tensor:
        """Sum the gradients of parameters, by logical name, over all samples.

        One without gradients counts as zero. Collective over the ranks that own slices. Returns
        what this rank owns of the bucket (width,).
        """
        first, dtype = bucket.spans[0].name, self._dtype_of(bucket)
        data, leaves = self.axis_of(first), self._leaves(paths[first])
        if not leaves.each:
            return torch.zeros(bucket.width, dtype=dtype, device=self.mesh.device)
        nodes = [leaves.nodes(self._sources_of(paths[first], r)) for r in range(data.size)]
        own = nodes[data.rank]
        # Of each owner's slice, the nodes that this rank has.
        rows = torch.zeros(data.size, len(own), bucket.width, dtype=dtype, device=self.mesh.device)
        for span in bucket.spans:
            of_rank = self._trees.pop(paths[span.name], SampleTree(leaves.total)).nodes
            for place, node in enumerate(own if of_rank else ()):
                copy(list(blocks(rows[:, place], span)), of_rank.pop(node))
        # Every rank gets its slice of all nodes, and adds them in the tree.
        counts = [len(own)] * data.size, [len(sent) for sent in nodes]
        received, tree = all_to_all(rows.flatten(0, 1), data, *counts), SampleTree(leaves.total)
        for node, row in zip(chain.from_iterable(nodes), received, strict=True):
            tree.add(node, row)
        (total,) = tree.nodes.values()
        return total

    def _dtype_of(self, bucket: Bucket) -> torch.dtype:
        """Return the dtype in which a bucket's gradients are added."""
        return self._places[bucket.spans[0].name][0].dtype
