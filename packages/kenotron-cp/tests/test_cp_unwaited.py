"""Attention over a backend whose results do not exist before they are waited for (fake NCCL)."""

import torch
from cp_cases import cases, on_this_rank
from test_cp_attend import alone

from kenotron_dist.testing import on_ranks


def test_bits_are_those_of_one_rank_where_nothing_waits_by_itself():
    expected = alone()
    for (name, way), tensors in on_ranks(on_this_rank, cp=4, backend="fake_nccl")[1].items():
        repeated = way == "ulysses" and cases()[name].kv_heads < 4  # added in another order
        pairs = list(zip(tensors, expected[name, "ring"], strict=True))
        for ours, right in pairs[:2] if repeated else pairs:
            assert torch.equal(ours, right), (name, way)
