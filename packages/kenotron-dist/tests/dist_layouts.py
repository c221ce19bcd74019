"""Random meshes and placements, and every rank of a mesh, for the property tests."""

import math
from dataclasses import dataclass

from hypothesis import strategies as st

from kenotron_dist import Chunk, Partial, Shard, TensorLayout, local_shape
from kenotron_dist.grid import AXES, coords_of

SIZES = {"pp": (1, 2), "dp": (1, 2, 3), "cp": (1, 2), "tp": (1, 2, 3, 4)}


@dataclass(frozen=True)
class Case:
    """A layout on a mesh."""

    layout: TensorLayout
    sizes: dict

    def ranks(self):
        """Coordinates of every rank that holds the tensor."""
        every = [coords_of(self.sizes, rank) for rank in range(math.prod(self.sizes.values()))]
        return [coords for coords in every if coords["pp"] in self.layout.stages]

    def flat(self, coords):
        """The layout of the slice that ZeRO gives to a rank: padded, uneven, perhaps empty."""
        cut = {shard.axis for shard in self.layout.shards}
        axes = tuple(axis for axis in ("dp", "cp") if axis not in cut)
        mine, ranks = 0, 1
        for axis in axes:
            mine, ranks = mine * self.sizes[axis] + coords[axis], ranks * self.sizes[axis]
        piece = -(-math.prod(local_shape(self.layout, self.sizes)) // ranks)
        return self.layout.sliced(mine * piece, (mine + 1) * piece, axes)


def chunks_of(draw, ranks):
    """One to three chunks that ``ranks`` can cut: fewer or more parts, padded or not."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    found = []
    for _ in range(draw(st.integers(1, 3))):
        parts = draw(st.sampled_from([None, *divisors, 2 * ranks, 3 * ranks]))
        whole = draw(st.integers(1, 3)) * (parts or ranks)
        pad = draw(st.sampled_from([0, 0, 0, min(1, whole - 1), whole // 2, whole - 1]))
        found.append(Chunk(whole - pad, parts, pad))
    return tuple(found)


@st.composite
def cases(draw, partial=False):
    """A mesh, a tensor of up to four dims, cut by none, one or two different axes."""
    sizes = {name: draw(st.sampled_from(SIZES[name])) for name in AXES}
    shape = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(0, 4)))]
    axes = draw(st.permutations(["tp", "cp", "dp"]))[: draw(st.integers(0, 2)) if shape else 0]
    placement, held = [], {}
    for axis in axes:
        dim, ranks = draw(st.integers(0, len(shape) - 1)), sizes[axis]
        if dim in held:  # a second cut of the same dim takes what the first one leaves
            even = held[dim] % ranks == 0 and draw(st.booleans())
            shard = Shard(axis, dim, None if even else (Chunk(held[dim], pad=-held[dim] % ranks),))
        else:
            shard = Shard(axis, dim, chunks_of(draw, ranks))
            shape[dim] = sum(chunk.size for chunk in shard.chunks)
        placement.append(shard)
        held[dim] = local_shape(TensorLayout("w", tuple(shape), tuple(placement)), sizes)[dim]
    if partial and draw(st.booleans()):
        placement.append(Partial(draw(st.sampled_from([a for a in AXES[1:] if a not in axes]))))
    stages = draw(st.sampled_from([(0,), (sizes["pp"] - 1,), tuple(range(sizes["pp"]))]))
    return Case(TensorLayout("w", tuple(shape), tuple(placement), stages), sizes)
