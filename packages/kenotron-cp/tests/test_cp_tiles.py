"""Blocks of several hundred tokens, as a training has them: dense attention, and equal bits."""

from functools import cache

import pytest
import torch
from cp_cases import WAYS, Case
from cp_dense import whole

from kenotron_cp import Cut, Layout, Visibility
from kenotron_dist import Axis
from kenotron_dist.testing import on_ranks

TOKENS = 1_100
LAYOUTS = {
    "contiguous": Layout("contiguous", strips=4, block=512),  # one block of 275 tokens a strip
    "zigzag": Layout(strips=8, block=512),  # one of 138
    "two blocks": Layout("contiguous", strips=4, block=200),  # two of 138 and 137
}
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 5e-3}


def case(dtype):
    """Documents that begin within blocks, one longer than a rank's tokens, and a window."""
    ids = torch.arange(5).repeat_interleave(torch.tensor([300, 1, 411, 87, 301]))
    return Case(Visibility(TOKENS, 250, ids), 2, 1, depth=64, width=64, dtype=dtype)


def computed(mesh, dtype):
    """Joined outputs and gradients by layout and way."""
    made = case(dtype)
    return {
        (name, way): whole(mesh, made.tensors(), made.sight, way=way, layout=layout)
        for name, layout in LAYOUTS.items()
        for way in WAYS
        if way != "ulysses" or mesh["cp"].size <= made.heads
    }


@cache
def alone(dtype):
    return computed({"cp": Axis.solo("cp")}, dtype)


def test_the_tiles_are_as_large_as_they_are_said_to_be():
    for name, sizes in (("contiguous", [275]), ("zigzag", [138]), ("two blocks", [138, 137])):
        for ranks in (1, 2, 4):
            cut = Cut(TOKENS, ranks, LAYOUTS[name])
            assert [block.end - block.begin for block in cut.blocks(1)] == sizes


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_large_tiles_are_dense_attention(dtype):
    expected = case(dtype).expected()
    for key, tensors in alone(dtype).items():
        for what, ours, right in zip("oqkv", tensors, expected, strict=True):
            error = (ours.double() - right).abs().max() / right.abs().max().clamp(min=1)
            assert error <= TOLERANCES[dtype], (key, what, float(error))


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_large_tiles_have_the_bits_of_one_rank(dtype, cp):
    expected = alone(dtype)
    for found in on_ranks(computed, dtype, cp=cp):
        for (name, way), tensors in found.items():
            pairs = list(zip(tensors, expected[name, "ring"], strict=True))
            for ours, right in pairs[:2] if way == "ulysses" else pairs:  # one key head
                assert torch.equal(ours, right), (name, way)
