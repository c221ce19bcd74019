"""A mesh without processes, and what is left when a mesh is closed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from kenotron_dist import Mesh, all_gather, all_reduce, gather_objects, host_numbers, to_device
from kenotron_dist.diagnosis import record
from kenotron_dist.testing import on_ranks


@pytest.fixture
def mesh():
    found = Mesh.connect(pp=2, dp=2, tp=2, ep=2, backend="fake", rank=5)
    yield found
    found.close()


def test_it_is_any_rank_of_any_world(mesh) -> None:
    assert mesh.is_fake and mesh.rank == 5 and mesh.device == torch.device("meta")
    assert mesh.coords == {"pp": 1, "dp": 0, "cp": 0, "tp": 1}
    assert mesh["tp"].ranks == (4, 5) and mesh.world.size == 8 and mesh["ep"].ranks == (4, 5)
    assert mesh.subaxis("dp", 1).ranks == (5, 7)
    mesh.close()
    assert not dist.is_initialized()
    large = Mesh.connect(pp=16, dp=128, tp=8, backend="fake", rank=16_383)
    assert large["dp"].size == 128 and large["dp"].rank == 127
    large.close()


def test_tensors_have_shapes_and_communications_are_recorded(mesh) -> None:
    x = torch.ones(4, 3, device="meta")
    with record(mesh) as recorder:
        assert all_gather(x, mesh["tp"]).shape == (8, 3)
        assert all_reduce(x, mesh["dp"]).is_meta
    assert recorder.bytes_per_axis() == {"tp": 48, "dp": 48}
    assert gather_objects({"a": 1}, mesh["dp"]) == [{"a": 1}] * 2
    assert host_numbers([x.sum()] * 2, 7.0) == [7.0, 7.0] and host_numbers([], 7.0) == []
    on_host = torch.ones(2)
    assert to_device(on_host, on_host.device) is on_host and to_device(on_host, x.device).is_meta
    assert host_numbers([torch.tensor(3.0), torch.tensor(0.5)], 7.0) == [3.0, 0.5]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 8}, "rank 8 is not in a world of 8: give one from 0 to 7"),
        ({"rank": -1}, "rank -1 is not in a world of 8"),
        ({"device": "cpu"}, "device cpu was given with backend 'fake', whose ranks have no values"),
    ],
)
def test_bad_arguments_are_named(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Mesh.connect(dp=8, backend="fake", **options)
    assert not dist.is_initialized()


def test_a_process_is_a_rank_of_one_world(mesh) -> None:
    with pytest.raises(ValueError, match="this process is rank 5 of a world of 8 already: close"):
        Mesh.connect(dp=2, backend="fake")


def test_what_asks_other_ranks_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    dist.set_debug_level_from_env()
    try:
        made = Mesh.connect(dp=2, backend="fake", rank=1)
        assert all_gather(torch.ones(1, device="meta"), made["dp"]).shape == (2,)
        made.close()
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    finally:
        monkeypatch.undo()
        dist.set_debug_level_from_env()


def reconnected(mesh: Mesh) -> list[float]:
    """Sums over a mesh that was closed and made again with other axes, three times."""
    found = []
    for sizes in ({"dp": 4}, {"tp": 2, "pp": 2}, {"dp": 2, "tp": 2}):
        mesh.close()
        mesh = Mesh.connect(**sizes)
        mesh.twin("dp")
        mesh.pairs("pp")
        for axis in ("dp", "tp", "pp"):
            found.append(all_reduce(torch.tensor(1.0 + mesh.rank), mesh[axis]).item())
    return found


def test_another_mesh_is_made_in_the_world_of_one_that_was_closed() -> None:
    found = on_ranks(reconnected, dp=2, tp=2)
    for rank, sums in enumerate(found):
        one, pairs, squares = 1.0 + rank, [3.0, 3.0, 7.0, 7.0][rank], [4.0, 6.0, 4.0, 6.0][rank]
        assert sums[:3] == [10.0, one, one]
        assert sums[3:6] == [one, pairs, squares]
        assert sums[6:] == [squares, pairs, one]
