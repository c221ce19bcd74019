"""First values are those of one whole tensor, however it is cut."""

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from dist_layouts import cases
from hypothesis import given, settings
from torch import nn

from kenotron_dist import GridView, MeshConfig
from kenotron_dist.boxes import Box, gather_into, local_shape, scatter
from kenotron_dist.grid_view import views_of
from kenotron_dist.hashing import key
from kenotron_dist.init import TILE, Constant, Normal, Uniform, fill_, initialize, normal_block
from kenotron_dist.placement import Chunk, Shard, TensorLayout, Tie, parameter_layouts

ONE = {"pp": 1, "dp": 1, "cp": 1, "tp": 1}
GRIDS = [
    dict(zip(("pp", "dp", "cp", "tp"), (pp, dp, 1, tp), strict=True))
    for pp, dp, tp in itertools.product((1, 2, 4, 8), repeat=3)
    if pp * dp * tp == 8
]
HEADS = (Chunk(320, parts=8), Chunk(80, parts=2), Chunk(80, parts=2))
LAYOUTS = {
    "rows": TensorLayout("rows", (512, 40), (Shard("tp", 0),)),
    "columns": TensorLayout("columns", (30, 600), (Shard("tp", 1),)),
    "kv": TensorLayout("kv", (480, 24), (Shard("tp", 0, HEADS),)),
    "vocabulary": TensorLayout("vocabulary", (257, 16), (Shard("tp", 0, (Chunk(257, pad=7),)),)),
    "bias": TensorLayout("bias", (1000,), (Shard("tp", 0),)),
    "stack": TensorLayout("stack", (3, 8, 300), (Shard("tp", 1),)),
    "deep": TensorLayout("deep", (2, 3, 4, 8), (Shard("tp", 3), Shard("dp", 2))),
    "scalar": TensorLayout("scalar", ()),
}


def every_rank(sizes):
    return [GridView.at(sizes, rank) for rank in range(math.prod(sizes.values()))]


def drawn(layout, view, dtype=torch.float32, seed=1):
    local = torch.full(local_shape(layout, view), 99.0, dtype=dtype)
    fill_(local, layout, view, Normal(0.02), seed=seed)
    return local


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_whole_tensor_is_the_same_on_every_grid(name):
    layout = LAYOUTS[name]
    for dtype in (torch.float32, torch.bfloat16):
        whole = drawn(TensorLayout(layout.name, layout.shape), GridView.at(ONE, 0), dtype)
        for sizes in GRIDS:
            if name == "deep" and sizes["dp"] > 4:
                continue
            for view in every_rank(sizes):
                local = drawn(layout, view, dtype)
                assert torch.equal(local, scatter(whole, layout, view))  # padding is 0


@settings(max_examples=60)
@given(cases())
def test_any_placement_and_slice_draws_the_same(case):
    layout = case.layout
    whole = drawn(TensorLayout("w", layout.shape), GridView.at(ONE, 0))
    found = torch.zeros_like(whole)
    for view in case.ranks()[:6]:
        assert torch.equal(drawn(layout, view), scatter(whole, layout, view))
        sliced = case.flat(view)
        assert torch.equal(drawn(sliced, view), scatter(whole, sliced, view))
    for view in case.ranks():
        gather_into(found, drawn(layout, view), layout, view)
    assert torch.equal(found, whole)


def block(start, shape, name="w", whole=(600, 700), seed=3):
    return normal_block(name, whole, Box(start, start, shape), seed=seed)


def test_a_matrix_of_many_tiles_drawn_by_blocks_is_the_matrix():
    whole = block((0, 0), (600, 700))
    starts = [(0, 0), (255, 255), (100, 300), (599, 699), (256, 512), (0, 255)]
    shapes = [(1, 1), (2, 2), (500, 400), (1, 1), (256, 188), (600, 1)]
    for start, shape in zip(starts, shapes, strict=True):
        rows, columns = (slice(a, a + n) for a, n in zip(start, shape, strict=True))
        assert torch.equal(block(start, shape), whole[rows, columns])


def test_values_are_those_of_numpy_philox_by_tile():
    whole = block((0, 0), (600, 700))
    for i, j in ((0, 0), (1, 2), (2, 2)):
        tile = whole[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
        philox = np.random.Generator(np.random.Philox(key=key(3, "w", i, j)))
        expected = philox.standard_normal(tuple(tile.shape), dtype=np.float32)
        assert np.array_equal(tile.numpy(), expected)


def test_no_two_tiles_parameters_or_seeds_are_alike():
    tiles = [
        block((i, j), (64, 64), name, seed=seed)
        for name, seed in (("w", 3), ("w", 4), ("layers.0.w", 3), ("layers.1.w", 3))
        for i in (0, 256, 512)
        for j in (0, 256, 512)
    ]
    stack = Box((0, 0, 0), (0, 0, 0), (3, 64, 64))
    tiles += list(normal_block("w", (3, 64, 64), stack, seed=3))
    flat = torch.stack([tile.flatten() for tile in tiles])
    correlation = torch.corrcoef(flat) - torch.eye(len(flat))
    assert correlation.abs().max() < 5 / math.sqrt(64 * 64)
    assert len({tuple(row[:8].tolist()) for row in flat}) == len(tiles)


def test_mean_deviation_and_shape_are_normal():
    x = block((0, 0), (600, 700)).double()
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((x.abs() < 1).double().mean() - 0.682689) < 0.004
    layout = TensorLayout("w", (600, 700))
    assert abs(drawn(layout, GridView.at(ONE, 0)).std() - 0.02) < 0.0002


class Model(nn.Module):
    """Tied, cut, constant and stacked parameters."""

    def __init__(self, dtype, tp=1):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12 // tp, 4), nn.Linear(4, 12 // tp, bias=False)
        for each in (self.embedding, self.head):
            each.placements = {"weight": (Shard("tp", 0), Tie("embedding.weight"))}
        self.norm, self.twin = nn.LayerNorm(4), nn.LayerNorm(4)
        self.to(dtype).to("meta").to_empty(device="cpu")


def rule(layout):
    if layout.role == "norm_bias":
        return Constant(0.0)
    return Normal(0.5) if layout.role == "embedding" else Constant(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_parameter_is_filled_exactly_once(dtype):
    asked, whole = [], Model(dtype)
    sizes = {**ONE, "tp": 2}

    def recorded(layout):
        asked.append(layout.name)
        return rule(layout)

    initialize(
        whole,
        parameter_layouts(whole, ONE),
        views_of(MeshConfig(), 0),
        seed=0,
        initializer=recorded,
    )
    assert sorted(asked) == [
        "embedding.weight", "norm.bias", "norm.weight", "twin.bias", "twin.weight"
    ]  # fmt: skip
    assert whole.head.weight.data_ptr() == whole.embedding.weight.data_ptr()
    assert whole.norm.weight.eq(1).all() and whole.twin.bias.eq(0).all()
    assert whole.head.weight.unique().numel() > 40
    for rank in range(2):
        part, view_of = Model(dtype, tp=2), views_of(MeshConfig(tp=2), rank)
        layouts = parameter_layouts(part, sizes)
        initialize(part, layouts, view_of, seed=0, initializer=rule)
        assert torch.equal(part.head.weight, whole.head.weight[6 * rank : 6 * rank + 6])
        del part.embedding  # as on a last stage: the head alone asks for the tied values
        part.head.weight.data = torch.zeros(6, 4, dtype=dtype)
        initialize(part, layouts, view_of, seed=0, initializer=rule)
        assert torch.equal(part.head.weight, whole.head.weight[6 * rank : 6 * rank + 6])


def test_a_parameter_without_a_layout_or_on_meta_is_an_error():
    model = nn.Linear(2, 2)
    layouts = parameter_layouts(model, ONE)
    arguments = {"view_of": views_of(MeshConfig(), 0), "seed": 0, "initializer": rule}
    with pytest.raises(ValueError, match="parameter 'weight' has no layout: was it added after"):
        initialize(model, {}, **arguments)
    with pytest.raises(ValueError, match="parameter 'weight' is on meta: call to_empty first"):
        initialize(model.to("meta"), layouts, **arguments)


def test_keys_tell_types_and_lengths_apart():
    parts = [("a", "b"), ("ab",), ("a", "b", ""), (1,), ("1",), (-1,), (1, 1), (11,), ()]
    keys = [key(*each) for each in parts]
    assert len(set(keys)) == len(keys)
    assert all(0 <= each < 2**128 for each in keys)
    assert max(key(i, bits=64) for i in range(100)).bit_length() in (63, 64)
    digest = hashlib.sha256(b"int:1:7str:15:layers.0.weightint:2:-1").digest()
    assert key(7, "layers.0.weight", -1, bits=48) == int.from_bytes(digest[:6], "little")


@pytest.mark.parametrize("name", LAYOUTS)
def test_even_draws_are_the_same_on_every_grid(name):
    layout = LAYOUTS[name]
    whole = torch.empty(layout.shape)
    bare = TensorLayout(layout.name, layout.shape)
    fill_(whole, bare, GridView.at(ONE, 0), Uniform(0.3), seed=1)
    assert whole.abs().max() <= 0.3
    if whole.numel() > 500:
        assert abs(whole.mean()) < 0.02 and whole.std() == pytest.approx(0.3 / 3**0.5, rel=0.05)
    for view in every_rank({"pp": 1, "dp": 2, "cp": 1, "tp": 4}):
        local = torch.full(local_shape(layout, view), 99.0)
        fill_(local, layout, view, Uniform(0.3), seed=1)
        assert torch.equal(local, scatter(whole, layout, view))


def test_computed_values_are_those_of_their_places():
    class Places:
        def block(self, layout, box, *, seed):
            return torch.arange(box.start[0], box.start[0] + box.shape[0], dtype=torch.float32)

    layout = LAYOUTS["bias"]
    for rank in range(8):
        view = GridView.at({"pp": 1, "dp": 1, "cp": 1, "tp": 8}, rank)
        local = torch.zeros(125)
        fill_(local, layout, view, Places(), seed=1)
        assert torch.equal(local, torch.arange(125.0) + 125 * rank)
