"""Numbers of leaves, and the ranks that have them."""

from __future__ import annotations

import itertools

import pytest

from kenotron_optim.sample_leaves import SampleLeaves
from kenotron_optim.sample_tree import nodes_of


@pytest.mark.parametrize("each", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("dp", "cp", "chunks"), [(1, 1, 1), (4, 1, 1), (2, 2, 4), (3, 4, 4), (2, 1, 2)]
)
def test_ranks_have_every_leaf_once(each: int, dp: int, cp: int, chunks: int) -> None:
    leaves, ranks = SampleLeaves(each, dp, cp, chunks), range(dp * cp)
    found = [
        leaves.number(source, use, sample)
        for source in ranks
        for use in range(leaves.uses)
        for sample in range(each)
    ]
    assert sorted(found) == [*range(leaves.total)] and leaves.total == each * dp * chunks


@pytest.mark.parametrize(("dp", "cp", "chunks"), [(4, 1, 1), (2, 2, 2), (3, 4, 8), (1, 1, 4)])
def test_nodes_of_all_ranks_cover_the_leaves(dp: int, cp: int, chunks: int) -> None:
    leaves = SampleLeaves(3, dp, cp, chunks)
    for together in (n for n in (1, 2, 4) if dp * cp % n == 0):
        starts = range(0, dp * cp, together)
        nodes = [leaves.nodes(range(start, start + together)) for start in starts]
        covered = [
            range(index << level, min((index + 1) << level, leaves.total))
            for level, index in itertools.chain(*nodes)
        ]
        assert sorted(i for each in covered for i in each) == [*range(leaves.total)]


def test_neighbours_are_one_run() -> None:
    leaves = SampleLeaves(3, 4, 1, 1)
    assert leaves.nodes(range(4)) == nodes_of(0, 12, 12)
    assert leaves.nodes(range(2, 4)) == nodes_of(6, 12, 12)


def test_one_chunk_keeps_the_numbers_of_samples() -> None:
    leaves = SampleLeaves(3, 4, 1, 1)
    assert [leaves.number(2, 0, i) for i in range(3)] == [6, 7, 8]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_cut_the_tokens_of_experts_as_chunks_do(tp: int) -> None:
    leaves = SampleLeaves(3, 2, 1, 1, tp=tp, shards=4)
    experts, chunks = leaves.of_experts, SampleLeaves(3, 2, tp, 4)
    assert leaves.uses == 1 and leaves.total == 6
    assert experts.uses == chunks.uses == 4 // tp and experts.total == chunks.total
    places = [(s, use, i) for s in range(2 * tp) for use in range(4 // tp) for i in range(3)]
    assert [experts.number(*each) for each in places] == [chunks.number(*each) for each in places]
    assert experts.nodes(range(tp)) == chunks.nodes(range(tp))


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
def test_shards_of_a_chunk_come_before_the_next_chunk(cp: int, tp: int) -> None:
    leaves = SampleLeaves(1, 1, cp, 4, tp=tp, shards=4).of_experts
    found = {}
    for source in range(cp * tp):
        for use in range(leaves.uses):
            chunk, shard = divmod(use, 4 // tp)
            chunk, shard = chunk + source // tp * 4 // cp, shard + source % tp * 4 // tp
            found[chunk, shard] = leaves.number(source, use, 0)
    assert found == {(chunk, shard): 4 * chunk + shard for chunk in range(4) for shard in range(4)}


def test_a_rank_has_neighbouring_chunks() -> None:
    leaves = SampleLeaves(3, 2, 2, 4)  # 6 samples: the first leaf of chunk i is 6 i
    starts = [[leaves.number(source, use, 0) for use in range(2)] for source in range(4)]
    assert starts == [[0, 6], [12, 18], [3, 9], [15, 21]]
