"""Rank arithmetic: lines part the world, coordinates invert ranks."""

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron_dist import MeshConfig
from kenotron_dist.grid import AXES, EXPERT_AXES, blocks_of, coords_of, line_through, lines, rank_of
from kenotron_dist.grid_view import GridView, views_of
from kenotron_dist.placement import FlatSlice, Partial, Shard, TensorLayout

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


@st.composite
def configs(draw):
    """Sizes of both grids."""
    config = MeshConfig(**draw(SIZES))
    stage = config.dp * config.cp * config.tp
    divisors = [n for n in range(1, stage + 1) if stage % n == 0]
    return MeshConfig(**{**config.sizes, "ep": draw(st.sampled_from(divisors))})


@given(configs())
def test_both_grids_have_the_same_ranks_in_the_same_order(config):
    dense, expert = config.sizes, config.expert_sizes
    assert math.prod(expert.values()) == config.world_size
    assert (expert["ep"], expert["etp"]) == (config.ep, 1)
    for rank in range(config.world_size):
        assert rank_of(expert, coords_of(expert, rank)) == rank
        assert coords_of(expert, rank)["pp"] == coords_of(dense, rank)["pp"]
    for line in lines(expert, ("ep",)):
        assert line == tuple(range(line[0], line[0] + config.ep))  # neighbours


@given(configs())
def test_a_line_of_experts_is_a_dense_line_on_all_ranks_or_on_none(config):
    """Else ranks would make different numbers of groups, since equal lines share one."""
    made = [*((name,) for name in AXES), ("dp", "cp"), ("dp", "cp", "tp"), AXES]
    dense = {line for names in made for line in lines(config.sizes, names)}
    for name in EXPERT_AXES[1:]:
        assert len({line in dense for line in lines(config.expert_sizes, (name,))}) == 1


def test_a_view_is_that_of_the_grid_that_placements_name():
    view_of = views_of(MeshConfig(pp=2, dp=2, tp=3, ep=2), rank=9)
    dense = view_of(TensorLayout("w", (6, 6), (Shard("tp", 0),)))
    assert dense == GridView(
        {"pp": 2, "dp": 2, "cp": 1, "tp": 3}, {"pp": 1, "dp": 1, "cp": 0, "tp": 0}, ("dp", "cp")
    )
    assert dense == view_of(TensorLayout("plain", (3,))) and dense.axes == AXES
    expert = GridView(
        {"pp": 2, "edp": 3, "ep": 2, "etp": 1}, {"pp": 1, "edp": 1, "ep": 1, "etp": 0}, ("edp",)
    )
    stacked = TensorLayout("experts", (4, 6, 6), (Shard("ep", 0),))
    assert view_of(stacked) == expert == view_of(TensorLayout("b", (3,), (Partial("ep"),)))
    assert stacked.sliced(0, 5).flat == FlatSlice(0, 5, ("edp",))
    assert view_of(stacked.sliced(0, 5)) == expert
    assert TensorLayout("w", (3,)).sliced(0, 1).flat == FlatSlice(0, 1, ("dp", "cp"))


def test_a_tensor_lives_in_one_grid():
    words = (
        "w: placed on tp of the dense grid and on ep of the expert grid: a tensor lives in one of "
        "them, so name axes of dp, cp, tp or of edp, ep, etp"
    )
    for mixed in ((Shard("ep", 0), Shard("tp", 1)), (Partial("tp"), Shard("ep", 0))):
        with pytest.raises(ValueError, match=re.escape(words)):
            views_of(MeshConfig(), 0)(TensorLayout("w", (2, 2), mixed))


@pytest.mark.parametrize("ep", [0, 3, 8])
def test_ep_divides_the_ranks_of_a_stage(ep):
    config = MeshConfig(pp=2, dp=2, tp=2, ep=ep)
    words = f"ep = {ep} does not divide the dp=2 * cp=1 * tp=2 = 4 ranks of a pipeline stage: "
    with pytest.raises(ValueError, match=re.escape(words + "choose a divisor of 4")):
        _ = config.axis_sizes


def test_blocks_are_of_consecutive_ranks():
    assert blocks_of(4, 6, 2, "dp") == ((4, 5), (0, 2, 4))
    with pytest.raises(ValueError, match="cannot cut 6 dp ranks into blocks of 4: choose a size"):
        blocks_of(0, 6, 4, "dp")
