"""Rank arithmetic: lines part the world, coordinates invert ranks."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron_dist import MeshConfig
from kenotron_dist.grid import AXES, coords_of, line_through, lines, rank_of

SIZES = st.fixed_dictionaries({name: st.integers(1, 4) for name in AXES})
NAMES = st.sets(st.sampled_from(AXES)).map(lambda names: tuple(n for n in AXES if n in names))


def test_tp_varies_fastest_and_pp_slowest():
    sizes = {"pp": 2, "dp": 3, "cp": 1, "tp": 4}
    assert coords_of(sizes, 0) == {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    assert coords_of(sizes, 1) == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert coords_of(sizes, 4) == {"pp": 0, "dp": 1, "cp": 0, "tp": 0}
    assert coords_of(sizes, 12) == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}
    assert rank_of(sizes, {"pp": 1, "tp": 3}) == 15


@given(SIZES)
def test_coordinates_invert_ranks(sizes):
    world = range(math.prod(sizes.values()))
    coords = [coords_of(sizes, rank) for rank in world]
    assert [rank_of(sizes, each) for each in coords] == list(world)
    ordered = [tuple(each.values()) for each in coords]
    assert ordered == list(itertools.product(*(range(n) for n in sizes.values())))


@given(SIZES, NAMES)
def test_lines_part_the_world(sizes, names):
    found = lines(sizes, names)
    assert sorted(itertools.chain(*found)) == list(range(math.prod(sizes.values())))
    assert {len(line) for line in found} == {math.prod(sizes[name] for name in names)}
    assert [line[0] for line in found] == sorted(line[0] for line in found)
    for line in found:
        for rank in line:
            assert line_through(sizes, names, rank) == line
        fixed = [{n: c for n, c in coords_of(sizes, r).items() if n not in names} for r in line]
        assert all(each == fixed[0] for each in fixed)


def test_a_config_knows_its_world():
    config = MeshConfig(pp=2, tp=3)
    assert config.sizes == {"pp": 2, "dp": 1, "cp": 1, "tp": 3}
    assert list(config.sizes) == list(AXES)
    assert config.world_size == 6
    with pytest.raises(TypeError):
        MeshConfig(2, 1, 1, 3)
