"""One binary tree over the samples of a global batch, in which every layout adds gradients.

Leaves are the n samples of a batch, in their order. Node (level, index) is the sum of the samples
from ``index << level`` to ``(index + 1) << level``, as far as there are so many. Its two children
are added, and a child without a sibling is its parent: ``((s0 + s1) + (s2 + s3)) + s4``, as in
``kenotron_dist.tree_sum``. Zhang et al. (TBIK, arXiv 2511.17826) add over tensor-parallel ranks so.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

Node = tuple[int, int]
"""(level, index)"""


class SampleTree:
    """A sum over some of the samples, which may come in any order.

    Two siblings are added as soon as both are there. At most two nodes of a level are kept, and
    ``log2(n) + 1`` in all where samples of an aligned block come in order.

    Args:
        samples: n, those of the global batch.
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self.nodes: dict[Node, Tensor] = {}
        """Sums without a sibling so far."""

    def add(self, node: Node, value: Tensor) -> None:
        """Add the sum of a node's samples, of any shape, which may be overwritten; each once."""
        level, index = node
        while index or 1 << level < self._samples:
            sibling = level, index ^ 1
            if sibling in self.nodes:
                value = self.nodes.pop(sibling).add_(value)
            elif index % 2 or (index + 1) << level < self._samples:
                break  # the sibling is still to come
            level, index = level + 1, index // 2
        self.nodes[level, index] = value


def nodes_of(start: int, stop: int, samples: int) -> list[Node]:
    """Return the largest nodes whose samples are all in [start, stop), in order.

    They are what a ``SampleTree`` keeps of these samples, at most ``2 log2(n)``.
    """

    def found(level: int, index: int) -> Iterator[Node]:
        first, last = index << level, min((index + 1) << level, samples)
        if start <= first < last <= stop:
            yield level, index
        elif first < stop and start < last:
            yield from found(level - 1, 2 * index)
            yield from found(level - 1, 2 * index + 1)

    return list(found((samples - 1).bit_length(), 0)) if start < stop else []
