"""Bytes that leave a rank, as the formula says and as the recorder counts them."""

import pytest
import torch
from cp_cases import WAYS, Case

from kenotron_cp import AttentionSize, Cut, Layout, Visibility, attend, attention_traffic
from kenotron_cp.sequence_cut import cut_sequence
from kenotron_dist.diagnosis import record
from kenotron_dist.testing import on_ranks


def counted(mesh):
    axis = mesh["cp"]
    for sight in (Visibility(60), Visibility(64, window=9), Visibility.of_lengths([30, 2, 32])):
        for layout in (Layout(), Layout("contiguous")):
            for dtype, kv_heads in ((torch.float32, 4), (torch.bfloat16, 2)):
                case = Case(sight, 4, kv_heads, batch=2, depth=8, width=4, dtype=dtype)
                cut = Cut(sight.sequence, axis.size, layout)
                size = AttentionSize(2, 4, kv_heads, 8, 4, dtype)
                *tensors, grad = (cut_sequence(x, axis, layout=layout) for x in case.tensors())
                for way in WAYS:
                    leaves = [x.clone().requires_grad_() for x in tensors]
                    found = []
                    with record(mesh) as recorder:
                        out = attend(*leaves, axis, sight, way=way, layout=layout)
                        found.append(sum(entry.sent for entry in recorder.cut()))
                        out.backward(grad)
                        found.append(recorder.bytes_per_axis().get("cp", 0))
                    assert tuple(found) == attention_traffic(way, size, sight, cut, axis.rank)


@pytest.mark.parametrize("cp", [2, 4])
def test_the_recorder_counts_what_the_formula_says(cp):
    on_ranks(counted, cp=cp)


def test_the_formula_in_closed_form():
    size, sight = AttentionSize(1, 8, 2, 16, 16, torch.bfloat16), Visibility(4096)
    for c in (2, 4, 8):
        own = 4096 // c * 2 * 2 * 16 * 2  # (S / c) 2 h_kv head_dim b
        ring, gather, ulysses = (
            [attention_traffic(way, size, sight, Cut(4096, c), rank) for rank in range(c)]
            for way in WAYS
        )
        assert sum(each.forward for each in ring) * 4 == 3 * c * (c - 1) * own
        assert max(each.forward for each in ring) == (c - 1) * own
        assert {each.backward - each.forward for each in ring} == {2 * (c - 1) * own}  # fp32
        assert {each.forward for each in gather} == {(c - 1) * own}
        tokens = 4096 // c * 2 * 16 * 2 * (8 + max(2, c))
        assert {each.forward for each in ulysses} == {tokens * (c - 1) // c}
        assert attention_traffic("ring", size, sight, Cut(4096, 1), 0) == (0, 0)


def test_a_window_sends_less_and_an_unknown_way_is_named():
    size, cut = AttentionSize(1, 8, 2, 16, 16), Cut(4096, 8)
    assert (
        attention_traffic("ring", size, Visibility(4096, 256), cut, 3).forward
        == 2 * 256 * 2 * 32 * 2
    )
    with pytest.raises(ValueError, match="way 'star' is not ring"):
        attention_traffic("star", size, Visibility(4096), cut, 0)
