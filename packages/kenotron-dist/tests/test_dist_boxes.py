"""Whatever the placement: each element is held, counted once, summed once, and found again."""

import math
from collections import defaultdict

import pytest
import torch
from dist_layouts import cases
from hypothesis import given
from hypothesis import strategies as st

from kenotron_dist import GridView
from kenotron_dist.boxes import (
    Box,
    gather_into,
    gradient_sums,
    local_boxes,
    local_shape,
    norm_weight,
    replica_index,
    replicas,
    scatter,
)
from kenotron_dist.flat import flat_blocks
from kenotron_dist.grid import lines, rank_of
from kenotron_dist.placement import Chunk, Partial, Shard, TensorLayout


def numbers(layout, first=1):
    """A tensor whose elements are all different, and none zero."""
    count = math.prod(layout.shape)
    return torch.arange(first, first + count, dtype=torch.float64).view(layout.shape)


@given(cases())
def test_each_element_is_held_counted_once_and_replicas_are_known(case):
    layout = case.layout
    holders = torch.zeros(layout.shape, dtype=torch.int64)
    weight = torch.zeros(layout.shape, dtype=torch.float64)
    promised, indices = torch.zeros_like(holders), defaultdict(set)
    for view in case.ranks():
        for box in local_boxes(layout, view):
            box.of_global(holders).add_(1)
            box.of_global(weight).add_(norm_weight(layout, view, box))
            box.of_global(promised).fill_(replicas(layout, view, box))
            for element in box.of_global(numbers(layout)).flatten().tolist():
                index = replica_index(layout, view, box)
                assert index not in indices[element]
                indices[element].add(index)
    assert holders.min() >= 1
    assert torch.equal(weight, torch.ones_like(weight))
    assert torch.equal(holders, promised)
    assert all(found == set(range(len(found))) for found in indices.values())


@given(cases())
def test_scatter_and_gather_are_inverse_and_padding_is_zero(case):
    layout = case.layout
    whole = numbers(layout)
    found = torch.zeros_like(whole)
    for view in case.ranks():
        local = scatter(whole, layout, view)
        assert local.shape == local_shape(layout, view)
        boxes = local_boxes(layout, view)
        assert sum(box.numel for box in boxes) == local.count_nonzero()  # no overlap, rest is zero
        gather_into(found, local, layout, view)
        for box in boxes:
            assert torch.equal(box.of_local(local), box.of_global(whole))
    assert torch.equal(found, whole)


@given(cases())
def test_the_local_tensor_is_the_concatenation_of_the_parts(case):
    """One dim at a time, by plain slicing, from the outermost axis to the innermost."""
    layout = case.layout
    for view in case.ranks()[:: max(1, len(case.ranks()) // 3)]:
        expected = numbers(layout)
        for shard in layout.shards:
            ranks, rank = view.sizes[shard.axis], view.coords[shard.axis]
            chunks = shard.chunks or (Chunk(expected.shape[shard.dim]),)
            pieces = []
            for chunk, piece in zip(
                chunks, expected.split([c.size for c in chunks], shard.dim), strict=True
            ):
                pad = [*piece.shape]
                pad[shard.dim] = chunk.pad
                padded = torch.cat([piece, piece.new_zeros(pad)], shard.dim)
                parts = min(chunk.parts or ranks, ranks)
                pieces.append(padded.chunk(parts, shard.dim)[rank * parts // ranks])
            expected = torch.cat(pieces, shard.dim)
        assert torch.equal(scatter(numbers(layout), layout, view), expected)


@given(cases())
def test_slices_of_the_data_ranks_cover_each_local_element_once(case):
    layout = case.layout
    weight = torch.zeros(layout.shape, dtype=torch.float64)
    held, promised = torch.zeros_like(weight), torch.zeros_like(weight)
    for view in case.ranks():
        sliced = case.flat(view)
        boxes = local_boxes(sliced, view)
        inside = torch.zeros(local_shape(layout, view)).flatten()
        inside[sliced.flat.start : sliced.flat.stop] = 1
        for box in boxes:
            assert box.of_local(inside.view(local_shape(layout, view))).all()
            box.of_global(weight).add_(norm_weight(sliced, view, box))
            box.of_global(held).add_(1)
            box.of_global(promised).fill_(replicas(sliced, view, box))
    assert torch.equal(weight, torch.ones_like(weight))
    assert torch.equal(held, promised)


@given(cases())
def test_sliced_tensors_come_back(case):
    layout = case.layout
    whole = numbers(layout)
    found = torch.zeros_like(whole)
    for view in case.ranks():
        sliced = case.flat(view)
        gather_into(found, scatter(whole, sliced, view), sliced, view)
    assert torch.equal(found, whole)


@given(cases(partial=True))
def test_summing_over_the_groups_makes_a_gradient_whole(case):
    """A rank's part of an element's gradient is any number; those that the cut parted are added."""
    layout = case.layout
    grads = {}
    partial = set(layout.partial_axes)
    for rank_number, view in enumerate(case.ranks()):
        whole = numbers(layout) * 10.0 + rank_number
        grads[rank_of(view.sizes, view.coords)] = (view, scatter(whole, layout, view))
    expected = defaultdict(float)  # (element, coordinates that do not matter for it) -> sum
    for view, local in grads.values():
        for element, value, key in elements(layout, view, local, partial):
            expected[element, key] += value
    summed = {rank: local for rank, (_, local) in grads.items()}
    plans = {rank: gradient_sums(layout, view) for rank, (view, _) in grads.items()}
    for turn in range(max(map(len, plans.values()))):  # one sum after the other
        before = {rank: local.clone() for rank, local in summed.items()}
        for rank, plan in plans.items():
            for each in plan[turn : turn + 1]:
                peers = group(case.sizes, each, rank)
                assert rank in peers and len(peers) > 1
                assert all(plans[peer][turn] == each for peer in peers)
                for box in each.boxes:
                    total = sum(box.of_local(before[peer]) for peer in peers)
                    box.of_local(summed[rank]).copy_(total)
    for rank, (view, _) in grads.items():
        for element, value, key in elements(layout, view, summed[rank], partial):
            assert value == expected[element, key]


def elements(layout, view, local, partial):
    """Each element a rank holds, its value, and the coordinates that its gradient depends on."""
    names = numbers(layout)
    for box in local_boxes(layout, view):
        free = partial | {axis for axis, parts in box.parts if parts < view.sizes[axis]}
        key = tuple(c for axis, c in view.coords.items() if axis not in free)
        for name, value in zip(
            box.of_global(names).flatten().tolist(),
            box.of_local(local).flatten().tolist(),
            strict=True,
        ):
            yield name, value, key


def group(sizes, each, rank):
    """Ranks of ``mesh.subaxis(axis, parts)`` that ``rank`` is one of."""
    line = next(line for line in lines(sizes, (each.axis,)) if rank in line)
    step = len(line) // each.parts
    part = line.index(rank) // step
    return line[part * step : (part + 1) * step]


def test_gradient_sums_are_only_where_they_are_needed():
    view = GridView({"dp": 2, "tp": 4}, {"dp": 0, "tp": 1})
    q_k = (Chunk(8), Chunk(4, parts=2), Chunk(2, parts=1))
    layout = TensorLayout("qkv", (14, 3), (Shard("tp", 0, q_k),))
    plan = {(each.axis, each.parts): each.boxes for each in gradient_sums(layout, view)}
    assert set(plan) == {("tp", 2), ("tp", 1)}
    assert [box.start for box in plan["tp", 2]] == [(8, 0)]
    assert [(box.local, box.shape) for box in plan["tp", 2]] == [((2, 0), (2, 3))]
    assert [(box.local, box.shape) for box in plan["tp", 1]] == [((4, 0), (2, 3))]
    whole = TensorLayout("w", (4, 4), (Shard("tp", 0),))
    assert gradient_sums(whole, view) == []
    norm = TensorLayout("n", (4,), (Partial("tp"),))
    assert [(e.axis, e.parts) for e in gradient_sums(norm, view)] == [("tp", 1)]
    assert gradient_sums(norm, GridView.at({"dp": 2, "tp": 1}, 0)) == []


def test_all_ranks_list_the_same_sums_also_one_that_holds_padding_only():
    layout = TensorLayout(
        "k",
        (3,),
        (
            Shard(
                "tp",
                0,
                (Chunk(2, parts=2, pad=2), Chunk(1, 1)),
            ),
        ),
    )
    plans = [gradient_sums(layout, GridView.at({"tp": 4}, rank)) for rank in range(4)]
    assert [[(e.axis, e.parts) for e in plan] for plan in plans] == [[("tp", 2), ("tp", 1)]] * 4
    assert [len(plan[0].boxes) for plan in plans] == [1, 1, 0, 0]


SHAPES = st.lists(st.integers(0, 5), max_size=5).map(tuple)


@given(SHAPES, st.data())
def test_a_flat_range_is_few_blocks_in_order(shape, data):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count + 2))
    stop = data.draw(st.integers(start, count + 4))
    names = torch.arange(count).view(shape)
    blocks = list(flat_blocks(shape, start, stop))
    assert len(blocks) <= max(2 * len(shape) - 1, 1)
    found = [n for i, e in blocks for n in Box(i, i, e).of_local(names).flatten().tolist()]
    assert found == list(range(count))[start:stop]
    assert all(min(extent, default=1) > 0 for _, extent in blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_dtypes_and_scalars_pass_through(dtype):
    view = GridView({"dp": 2, "tp": 2}, {"dp": 1, "tp": 1})
    whole, rows = torch.ones(4, 2, dtype=dtype), TensorLayout("w", (4, 2), (Shard("tp", 0),))
    assert scatter(whole, rows, view).dtype == dtype
    scalar = TensorLayout("s", ())
    assert local_boxes(scalar, view) == [Box((), (), ())]
    assert scatter(torch.ones((), dtype=dtype), scalar, view).item() == 1
    assert local_boxes(scalar.sliced(0, 1), view) == [Box((), (), (), (("dp", 2),))]
    assert local_boxes(scalar.sliced(1, 2), view) == []


def test_one_rank_holds_everything_as_it_is():
    layout = TensorLayout("w", (6, 4), (Shard("tp", 0, (Chunk(4, 2), Chunk(2, pad=0))),))
    boxes = local_boxes(layout, GridView.at({"tp": 1}, 0))
    assert [(box.local, box.start, box.shape) for box in boxes] == [
        ((0, 0), (0, 0), (4, 4)),
        ((4, 0), (4, 0), (2, 4)),
    ]


@pytest.mark.parametrize(
    ("shape", "shard", "words"),
    [
        ((15, 2), Shard("tp", 0), "cannot split dim 0 of size 15 over 2 tp ranks"),
        ((8, 3), Shard("tp", 1), "cannot split dim 1 of size 3 over 2 tp ranks"),
        ((9,), Shard("tp", 0, (Chunk(9, parts=4),)), "cannot split dim 0 of size 9 over 4 parts"),
        (
            (9,),
            Shard("tp", 0, (Chunk(9, parts=3),)),
            "cannot place 3 indivisible parts of dim 0 over 2 tp ranks: one number must divide",
        ),
        (
            (9,),
            Shard("tp", 0, (Chunk(4), Chunk(4))),
            r"chunks \[4, 4\] of dim 0 add up to 8, but the dimension has 9 elements",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_an_error(shape, shard, words):
    layout = TensorLayout("w", shape, (shard,))
    with pytest.raises(ValueError, match=words):
        local_shape(layout, GridView.at({"tp": 2}, 0))
    with pytest.raises(ValueError, match=words):
        local_boxes(layout, GridView.at({"tp": 2}, 0))


@pytest.mark.parametrize("block", [1, 2, 4, None])
def test_slices_that_blocks_of_ranks_repeat_are_counted_once(block):
    sizes = {"pp": 1, "dp": 4, "cp": 2, "tp": 2}
    ranks = (block or 4) * 2  # that own different slices
    plain = TensorLayout("x", (8, 3), (Shard("tp", 0),))
    each = -(-12 // ranks)
    counted, held = torch.zeros(8, 3), defaultdict(list)
    for rank in range(16):
        view = GridView.at(sizes, rank)
        own = (view.coords["dp"] * 2 + view.coords["cp"]) % ranks
        layout = plain.sliced(min(own * each, 12), min((own + 1) * each, 12), block=block)
        for box in local_boxes(layout, view):
            box.of_global(counted).add_(norm_weight(layout, view, box))
            held[box.start, box.shape].append(replica_index(layout, view, box))
            assert replicas(layout, view, box) == 4 // (block or 4)
    assert counted.eq(1).all()
    assert all(sorted(found) == list(range(4 // (block or 4))) for found in held.values())
