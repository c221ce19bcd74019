"""Random meshes and placements, and every rank of a mesh, for the property tests."""

import math
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from kenotron_dist import GridView, MeshConfig
from kenotron_dist.boxes import local_shape
from kenotron_dist.grid import AXES, DATA_AXES
from kenotron_dist.grid_view import views_of
from kenotron_dist.placement import Chunk, Partial, Shard, TensorLayout

SIZES = {"pp": (1, 2), "dp": (1, 2, 3), "cp": (1, 2), "tp": (1, 2, 3, 4)}


@dataclass(frozen=True)
class Case:
    """A layout on a mesh."""

    layout: TensorLayout
    config: MeshConfig
    grid: str = "dense"
    """That of the tensor, or for one that is whole everywhere any of the two."""

    @property
    def sizes(self):
        """Sizes of the grid that the tensor lives in."""
        return self.config.expert_sizes if self.grid == "expert" else self.config.sizes

    def ranks(self):
        """The view of every rank that holds the tensor."""
        every = [views_of(self.config, rank)(self.layout) for rank in range(self.config.world_size)]
        assert all(tuple(view.sizes.items()) == tuple(self.sizes.items()) for view in every)
        return [view for view in every if view.coords["pp"] in self.layout.stages]

    def flat(self, view):
        """The layout of the slice that ZeRO gives to a rank: padded, uneven, perhaps empty."""
        cut = {shard.axis for shard in self.layout.shards}
        axes = tuple(axis for axis in DATA_AXES[self.grid] if axis not in cut)
        mine, ranks = 0, 1
        for axis in axes:
            mine = mine * view.sizes[axis] + view.coords[axis]
            ranks *= view.sizes[axis]
        piece = -(-math.prod(local_shape(self.layout, view)) // ranks)
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
    """A mesh, a tensor of up to four dims, cut by none, one or two different axes of a grid.

    In the expert grid at least one, since nothing else says that a tensor lives there.
    """
    config = MeshConfig(**{name: draw(st.sampled_from(SIZES[name])) for name in AXES})
    stage = config.dp * config.cp * config.tp
    divisors = [n for n in range(1, stage + 1) if stage % n == 0]
    config = replace(config, ep=draw(st.sampled_from(divisors)))
    grid = draw(st.sampled_from(sorted(DATA_AXES)))
    expert = grid == "expert"
    sizes = config.expert_sizes if expert else config.sizes
    shape = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(expert, 4)))]
    names = ["ep", "etp", "edp"] if expert else ["tp", "cp", "dp"]
    axes = draw(st.permutations(names))[: draw(st.integers(expert, 2)) if shape else 0]
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
        layout = TensorLayout("w", tuple(shape), tuple(placement))
        held[dim] = local_shape(layout, GridView.at(sizes, 0))[dim]
    if partial and draw(st.booleans()):
        placement.append(Partial(draw(st.sampled_from([a for a in names if a not in axes]))))
    stages = draw(st.sampled_from([(0,), (sizes["pp"] - 1,), tuple(range(sizes["pp"]))]))
    return Case(TensorLayout("w", tuple(shape), tuple(placement), stages), config, grid)
