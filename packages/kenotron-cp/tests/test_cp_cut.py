"""Which tokens each rank holds, and cutting and joining tensors."""

import pytest
import torch

from kenotron_cp import Cut, Layout, cut_sequence, join_sequence
from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks

LAYOUTS = [Layout(), Layout("contiguous"), Layout(block=3), Layout(strips=48)]


def test_zigzag_is_torchs_head_tail_load_balancer():
    balancer = pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel._load_balancer"
    )
    for ranks, sequence in ((1, 48), (2, 64), (4, 96), (8, 16), (3, 12), (6, 60), (16, 64)):
        cut = Cut(sequence, ranks)
        theirs = balancer._HeadTailLoadBalancer(sequence, ranks, "cpu")
        ours = torch.cat([cut.positions(rank) for rank in range(ranks)])
        assert torch.equal(ours, theirs._generate_indices()[0].long())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sequence", [1, 5, 16, 37, 96])
def test_every_position_is_on_one_rank_and_blocks_tile_it(layout, sequence):
    for ranks in (2, 3, 4, 6, 8):
        if layout.strips and ranks not in (3, 6):
            continue
        cut = Cut(sequence, ranks, layout)
        places = torch.cat([cut.positions(rank) for rank in range(ranks)])
        assert sorted(places.tolist()) == list(range(cut.padded))
        assert {len(cut.positions(rank)) for rank in range(ranks)} == {cut.local}
        assert sequence <= cut.padded < sequence + cut.strips
        blocks = [block for strip in range(cut.strips) for block in cut.blocks(strip)]
        assert [b.begin for b in blocks] + [cut.padded] == [0] + [b.end for b in blocks]
        assert all(1 <= b.end - b.begin <= layout.block for b in blocks)


def test_the_grid_is_the_same_for_1_2_4_and_8_ranks():
    for sequence in (1, 100, 4096, 70_000):
        grids = {
            tuple(b for strip in range(cut.strips) for b in cut.blocks(strip))
            for cut in (Cut(sequence, ranks) for ranks in (1, 2, 4, 8))
        }
        assert len(grids) == 1


def there_and_back(mesh):
    axis = mesh["cp"]
    for sequence in (2, 37, 64):
        for layout in LAYOUTS[:3]:
            cut = Cut(sequence, axis.size, layout)
            x = torch.arange(3.0 * sequence * 2).view(3, sequence, 2).requires_grad_()
            own = cut_sequence(x, axis, layout=layout, fill=-1)
            places = cut.positions(axis.rank)
            real = places < sequence
            assert torch.equal(own[:, real], x[:, places[real]]) and (own[:, ~real] == -1).all()
            back = join_sequence(own, axis, sequence, layout=layout)
            assert torch.equal(back, x)
            weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
            (back * weight).sum().backward()
            assert torch.equal(x.grad, weight)
            ids = torch.arange(sequence)
            assert torch.equal(join_sequence(cut_sequence(ids, axis, 0), axis, sequence, 0), ids)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_cut_and_join_are_inverse_and_so_are_their_gradients(cp):
    on_ranks(there_and_back, cp=cp)


def test_errors_name_the_value_and_what_to_do():
    with pytest.raises(ValueError, match="order 'zig' is not zigzag or contiguous"):
        Layout("zig")
    with pytest.raises(ValueError, match="block is 0, it must be at least 1"):
        Layout(block=0)
    with pytest.raises(ValueError, match="sequence 0 and ranks 2 must be at least 1"):
        Cut(0, 2)
    with pytest.raises(ValueError, match="24 strips do not fit 2 ranks.*4 times a power of two"):
        Cut(64, 2, Layout(strips=24))
    with pytest.raises(ValueError, match="has 3 tokens; 5 tokens on 1 cp ranks are 5 a rank"):
        join_sequence(torch.zeros(1, 3), Axis.solo("cp"), 5)
