"""Numbers of the leaves of the tree of samples, and the ranks that have them.

A leaf is a virtual chunk of a sample; leaf ``chunk * n + sample`` comes after all samples of the
chunks before. A source is a rank of dp x cp, whose tokens a gradient is of. Experts have sources
of dp x cp x tp: virtual shards of tp cut the tokens of each chunk, too, and are chunks of their own
here, of which a source has some of each of its chunks.

Shapes: n samples of the global batch, R of each data rank, c ranks of cp, C chunks of a sample,
k = C / c chunks of a source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kenotron_optim.sample_tree import Node, SampleTree, nodes_of


@dataclass(frozen=True)
class SampleLeaves:
    """The leaves of one step."""

    each: int
    """R."""
    dp: int
    cp: int
    chunks: int
    """C."""
    tp: int = 1
    shards: int = 1
    """Virtual shards of tp."""
    expert: bool = False
    """True: of the gradients of experts, of which each virtual shard has its own tokens."""

    @property
    def of_experts(self) -> SampleLeaves:
        """Leaves of the gradients of experts."""
        return replace(self, expert=True)

    @property
    def total(self) -> int:
        """Leaves of the global batch."""
        return self.chunks * (self.shards if self.expert else 1) * self.each * self.dp

    @property
    def uses(self) -> int:
        """k, leaves that a backward pass has of each source; of experts k times its shards."""
        return self.chunks // self.cp * self._own_shards

    @property
    def _own_shards(self) -> int:
        return self.shards // self.tp if self.expert else 1

    def number(self, source: int, use: int, sample: int) -> int:
        """Return the leaf of chunk ``use`` of a source's own, of its sample ``sample``.

        Uses of experts are the shards of a source's first chunk, then those of the next.
        """
        chunk, shard = divmod(use, self._own_shards)
        if self.expert:
            source, tp = divmod(source, self.tp)
            shard += tp * self._own_shards
        data, part = divmod(source, self.cp)
        chunk += part * (self.chunks // self.cp)
        place = chunk * self.shards + shard if self.expert else chunk
        return (place * self.dp + data) * self.each + sample

    def most_nodes(self, sources: range) -> int:
        """Return the most sums that a tree keeps of the leaves of some sources between backwards.

        Each backward has one sample of all sources, in their order.
        """
        tree, most = SampleTree(self.total), 0
        for sample in range(self.each):
            for source in sources:
                for use in range(self.uses):
                    tree.add((0, self.number(source, use, sample)), torch.empty(0))
            most = max(most, len(tree.nodes))
        return most

    def nodes(self, sources: range) -> list[Node]:
        """Return the nodes that a tree of the leaves of some sources keeps, in order."""
        starts = sorted(self.number(s, use, 0) for s in sources for use in range(self.uses))
        ends = [start + self.each for start in starts]
        begins = [start for start in starts if start not in ends]  # neighbours are one run
        runs = zip(begins, [end for end in ends if end not in starts], strict=True)
        return [node for run in runs for node in nodes_of(*run, self.total)]
