"""Meshes: each view talks to the right ranks, groups are made once, several meshes coexist."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kenotron_dist import Mesh, all_gather, all_reduce
from kenotron_dist.grid import AXES, line_through, lines
from kenotron_dist.testing import on_ranks

VIEWS = [n for size in range(1, 5) for n in itertools.combinations(AXES, size)]


def members(axis):
    """Global ranks that really answer on an axis."""
    me = dist.get_rank() if dist.is_initialized() else 0
    return tuple(all_gather(torch.tensor([me]), axis).tolist())


def check_views(mesh):
    assert (mesh.rank, mesh.device) == (dist.get_rank(), torch.device("cpu"))
    for names in VIEWS:
        axis = mesh[names]
        line = next(line for line in lines(mesh.sizes, names) if mesh.rank in line)
        assert axis.ranks == line == members(axis)
        assert (axis.size, axis.ranks[axis.rank]) == (len(line), mesh.rank)
        assert axis.name == "_".join(names)
        assert (axis.group is None) == (axis.size == 1)
        assert mesh[names[::-1]] is axis  # the order of the names does not matter
    assert mesh["tp"] is mesh["tp",] and mesh.world is mesh[AXES]
    groups = {mesh[names].ranks: mesh[names].group for names in VIEWS}
    assert all(mesh[names].group is groups[mesh[names].ranks] for names in VIEWS)
    assert mesh.world.group is (dist.group.WORLD if mesh.world.size > 1 else None)
    return repr(mesh)


@pytest.mark.parametrize(
    "sizes", [{"tp": 1}, {"tp": 3}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}, {"cp": 2}]
)
def test_every_view_reaches_its_line(sizes):
    assert "rank=0, device=cpu" in on_ranks(check_views, **sizes)[0]


def check_expert_views(mesh):
    sizes = mesh.config.expert_sizes
    for names in [("edp",), ("ep",), ("etp",), ("edp", "ep"), ("pp", "ep")]:
        axis = mesh[names]
        assert axis.ranks == line_through(sizes, names, mesh.rank) == members(axis)
        assert (axis.name, axis.group is None) == ("_".join(names), axis.size == 1)
    if mesh.config.ep == mesh.sizes["tp"]:
        assert mesh["ep"].group is mesh["tp"].group and mesh["ep"] is not mesh["tp"]
    half = mesh.subaxis("ep", mesh.config.ep // 2)
    assert members(half) == half.ranks and half.size == 2
    with pytest.raises(ValueError, match="mesh.'dp', 'ep'.: placed on dp of the dense grid and on"):
        mesh["dp", "ep"]
    return repr(mesh)


@pytest.mark.parametrize(
    "sizes", [{"dp": 4, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2}, {"pp": 2, "dp": 2, "tp": 2, "ep": 4}]
)
def test_every_expert_view_reaches_its_line(sizes):
    assert f" ep={sizes['ep']}, rank=0" in on_ranks(check_expert_views, **sizes)[0]


def groups_made(mesh):
    """Groups that ``connect`` made, and the lines of experts."""
    made = sum(ticket.number for ticket in mesh.pulse.tickets.values() if ticket.axis == "group")
    names = ("edp", "ep", "etp")
    lines = [mesh[name].ranks for name in names]
    after = sum(ticket.number for ticket in mesh.pulse.tickets.values() if ticket.axis == "group")
    return made, after, lines


def test_groups_of_experts_are_made_only_with_ep():
    plain = on_ranks(groups_made, dp=2, tp=2)
    assert plain[1] == (2, 2, [(0, 1, 2, 3), (1,), (1,)])  # dp and tp; edp is the world
    assert on_ranks(groups_made, dp=4)[1] == (0, 0, [(0, 1, 2, 3), (1,), (1,)])
    assert on_ranks(groups_made, dp=4, ep=2)[1] == (2, 2, [(1, 3), (0, 1), (1,)])
    assert on_ranks(groups_made, dp=2, tp=2, ep=2)[1] == (2, 2, [(1, 3), (0, 1), (1,)])


def test_an_ep_that_divides_nothing_starts_no_rank():
    with pytest.raises(ValueError, match="ep = 3 does not divide the dp=2 . cp=1 . tp=1 = 2 ranks"):
        on_ranks(check_expert_views, dp=2, ep=3)


def check_cells(mesh):
    axis = mesh.subaxis("tp", 2)
    half = mesh.coords["tp"] // 2
    assert axis.ranks == mesh["tp"].ranks[2 * half : 2 * half + 2] == members(axis)
    assert axis is mesh.subaxis("tp", 2)
    assert mesh.subaxis("tp", 1).group is mesh["tp"].group
    alone = mesh.subaxis("tp", 4)
    assert alone.ranks == (mesh.rank,) and alone.group is None
    ends = mesh.subset("tp", (3, 0))
    if mesh.coords["tp"] in (0, 3):
        assert members(ends) == (mesh["tp"].ranks[0], mesh["tp"].ranks[3])
        assert ends is mesh.subset("tp", [0, 3, 3])
    else:
        assert ends is None and mesh.subset("tp", (0, 3)) is None
    one = mesh.subset("tp", (2,))
    assert (one is not None) == (mesh.coords["tp"] == 2)
    assert one is None or (one.size, one.group) == (1, None)
    everyone = mesh.subset("tp", range(4))
    assert everyone.group is mesh["tp"].group
    assert mesh.subset("pp", (0,)).ranks == (mesh.rank,)  # an axis of size 1


def check_twin(mesh):
    axis, twin = mesh["tp"], mesh.twin("tp")
    assert (twin.rank, twin.ranks, twin.backend) == (axis.rank, axis.ranks, axis.backend)
    assert twin is mesh.twin("tp") and twin.group is not axis.group
    assert members(twin) == axis.ranks
    assert mesh.twin("pp").group is None  # an axis of size 1


def test_a_twin_has_the_same_ranks_and_another_group():
    on_ranks(check_twin, tp=2, dp=2)


def check_two_meshes(mesh):
    """The first made groups of all kinds; the second must not meet them by name."""
    check_cells(mesh)
    other = Mesh.connect(dp=2, tp=2)
    third = Mesh.connect(tp=4)
    check_cells(third)
    for each, value in ((mesh, 1), (other, 10), (third, 100), (mesh, 1000)):
        total = all_reduce(torch.tensor([value]), each["tp"])
        assert total.item() == value * each["tp"].size
    assert members(other["dp"]) == ((0, 2) if mesh.rank % 2 == 0 else (1, 3))
    second = other.subaxis("dp", 1)
    assert members(second) == members(other["dp"])
    assert mesh["tp"] is not third["tp"]


def test_cells_of_a_line_and_two_meshes_in_one_process():
    on_ranks(check_two_meshes, tp=4)


def check_cells_of_many_lines(mesh):
    ends = mesh.subset("pp", (0, 2))
    assert (ends is None) == (mesh.coords["pp"] == 1)
    if ends is not None:
        assert members(ends) == (mesh.coords["tp"], 4 + mesh.coords["tp"])
    return members(mesh.subaxis("pp", 3)), members(mesh["dp", "tp"])


def test_cells_of_every_line_are_apart():
    found = on_ranks(check_cells_of_many_lines, pp=3, tp=2)
    assert found == [((r,), (r // 2 * 2, r // 2 * 2 + 1)) for r in range(6)]


def check_device_mesh(mesh):
    made = mesh.device_mesh()
    assert made.mesh_dim_names == AXES and tuple(made.shape) == (2, 1, 1, 2)
    assert made["tp"].get_local_rank() == mesh["tp"].rank
    assert dist.get_process_group_ranks(made.get_group("pp")) == list(mesh["pp"].ranks)
    x = torch.ones(1)
    dist.all_reduce(x, group=made.get_group("pp"))
    assert x.item() == 2 and members(mesh["pp"]) == mesh["pp"].ranks


def check_a_mesh_alone(mesh):
    if mesh.rank:  # and no other rank takes part
        return None
    alone = Mesh.alone()
    assert alone.world.size == alone["ep"].size == 1 and alone.device.type == "cpu"
    return all_reduce(torch.ones(1), alone["dp", "tp"]).item()


def test_a_rank_may_have_a_mesh_alone():
    assert on_ranks(check_a_mesh_alone, dp=2, tp=2)[0] == 1


def test_a_device_mesh_is_the_same_grid():
    on_ranks(check_device_mesh, pp=2, tp=2)


def check_copies(mesh):
    layer = nn.Linear(2, 2)
    layer.axis = mesh["tp"]
    twin = copy.deepcopy(nn.Sequential(layer))[0]
    assert twin.axis is mesh["tp"]
    return all_reduce(twin.weight.detach() * 0 + 1, twin.axis).eq(2).all().item()


def test_a_module_that_holds_an_axis_can_be_copied():
    assert on_ranks(check_copies, tp=2) == [True, True]


def errors_on_ranks(mesh):
    calls = [
        lambda: Mesh.connect(tp=3),
        lambda: Mesh.connect(tp=2, dp=0),
        lambda: mesh.subaxis("tp", 3),
        lambda: mesh.subaxis("tp", 0),
        lambda: mesh.subset("tp", (0, 2)),
        lambda: mesh.subset("tp", ()),
        lambda: mesh["xp"],
        lambda: mesh["tp", "xp"],
        lambda: mesh[()],
    ]
    found = []
    for call in calls:
        with pytest.raises((ValueError, KeyError)) as error:
            call()
        found.append(str(error.value.args[0]))
    return found


def test_what_a_mesh_cannot_do_is_a_sentence():
    for found in on_ranks(errors_on_ranks, tp=2):
        assert found == [
            "pp=1 * dp=1 * cp=1 * tp=3 = 3, but the world has 2 ranks: change the sizes or start "
            "3 processes",
            "dp = 0: an axis has at least one rank",
            "cannot form 3 groups of equal size from 2 tp ranks: choose a number that divides 2",
            "cannot form 0 groups of equal size from 2 tp ranks: choose a number that divides 2",
            "tp coordinates [0, 2] are not all within 0..1",
            "tp coordinates [] are not all within 0..1",
            "no axis xp in this mesh; it has pp, dp, cp, tp, edp, ep, etp",
            "no axis xp in this mesh; it has pp, dp, cp, tp, edp, ep, etp",
            "name an axis of this mesh: pp, dp, cp, tp, edp, ep, etp",
        ]


def test_one_rank_needs_no_process_group():
    mesh = Mesh.connect()
    assert not dist.is_initialized()
    assert mesh.world.size == 1 and mesh["dp", "cp"].group is None
    assert mesh.subaxis("tp", 1).size == 1 and mesh.subset("pp", (0,)).ranks == (0,)
    assert mesh.device == torch.device("cpu")
    assert Mesh.connect(device="meta").device == torch.device("meta")
    with pytest.raises(
        ValueError, match="= 2, but the world has 1 rank: change the sizes or start"
    ):
        Mesh.connect(tp=2)
    with pytest.raises(RuntimeError, match="device_mesh.. needs a process group: start with spawn"):
        mesh.device_mesh()
