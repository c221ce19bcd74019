"""Copies on the next host: any one host may be lost, and saves are never mixed."""

import errno
import shutil
from pathlib import Path

import pytest
import torch
from ckpt_cases import PADDING, model

from kenotron_ckpt import HostCopies, HostSaver, NoCheckpoint, file_moves, host_saver, hosts_of
from kenotron_ckpt.generation import Generation
from kenotron_ckpt.host_copy import HostCopy
from kenotron_ckpt.hosts import Hosts
from kenotron_dist import Mesh, barrier
from kenotron_dist.testing import on_ranks

OF = (0, 0, 1, 2)
"""Hosts of the ranks of pp 2 x dp 2."""


def values(mesh, factor, blank=False):
    """Tensors whose floating-point values tell which save wrote them."""
    found = model(mesh, blank)
    for tensor, _ in found.values():
        if tensor.is_floating_point():
            tensor[tensor != PADDING] *= factor
    return found


class Rank:
    """A rank of hosts whose folders are ``host0`` to ``host2``."""

    def __init__(self, mesh: Mesh, base: Path, background: bool) -> None:
        self.mesh, self.base, self.own = mesh, base, base / f"host{OF[mesh.rank]}"
        self.own.mkdir(parents=True, exist_ok=True)
        barrier(mesh.world)
        self.hosts = hosts_of(self.own, mesh)
        self.copies = HostCopies(self.own, mesh, self.hosts)
        self.saver, self.background = HostSaver(self.copies, background=background), background

    def start(self, number):
        """Save as the start of this number, which is told apart from others by its token."""
        self.saver._generation = Generation(self.base / "no lock", number, f"{number:016x}")

    def save(self, step, factor):
        saved = values(self.mesh, factor)
        try:
            self.saver.save(step, saved, {"factor": factor})
            self.saver.wait()
            if self.background:
                for tensor, _ in saved.values():
                    tensor.zero_()
            self.saver.finish()
        except ValueError as error:
            return str(error)
        (report,) = self.saver.reports()
        return report.failure

    def read(self):
        """The factor of what is read, after its values were compared; or why there is nothing."""

        def load(found):
            wanted = values(self.mesh, 0, blank=True)
            factor = found.load(wanted).state["factor"]
            for key, (expected, _) in values(self.mesh, factor).items():
                assert torch.equal(wanted[key][0], expected), key
            return factor

        try:
            return self.copies.read(load)
        except NoCheckpoint as error:
            return str(error)

    def alone(self, run):
        """Change folders on one rank, between those of others."""
        barrier(self.mesh.world)
        if self.mesh.rank == 0:
            run()
        barrier(self.mesh.world)

    def lose(self, *hosts):
        """Put empty folders in the place of those of hosts."""

        def replace():
            for host in hosts:
                shutil.rmtree(self.base / f"host{host}")
                (self.base / f"host{host}").mkdir()

        self.alone(replace)

    def backup(self, name):
        self.alone(lambda: shutil.copytree(self.base, self.base.parent / name))

    def restore(self, name, *hosts):
        def copy():
            for each in hosts or (0, 1, 2):
                shutil.rmtree(self.base / f"host{each}")
                shutil.copytree(self.base.parent / name / f"host{each}", self.base / f"host{each}")

        self.alone(copy)


def work(mesh, base, background):
    file_moves.CHUNK = 100  # several rounds
    rank, found = Rank(mesh, base / "hosts", background), {}
    found["hosts"] = rank.hosts.of
    found["failures"] = [rank.save(1, 1), rank.save(2, 2)]
    found["names"] = sorted(p.relative_to(rank.own).as_posix() for p in rank.own.rglob("*.safe*"))
    rank.backup("second")
    for host in range(3):
        rank.lose(host)
        found[f"lost {host}"] = rank.read()
        rank.restore("second")
    rank.lose(0, 1)
    found["newest of too few"], found["too few"] = rank.copies.newest(), rank.read()
    # The same step once more: the files of host 1 are those of the save before.
    rank.restore("second")
    rank.save(2, 3)
    found["saved again"] = rank.read()
    rank.restore("second", 1)
    rank.lose(0)
    found["stale"] = rank.read()
    # Bytes of a file that is on no other host any more.
    rank.restore("second")
    rank.lose(0)
    rank.alone(lambda: damage(base / "hosts/host1"))
    found["damaged"] = rank.read()
    rank.restore("second")
    rank.lose(0)
    rank.alone(lambda: cut_short(base / "hosts/host1"))
    found["cut short"] = rank.read()
    # No room on one host; and one that cannot commit when others have.
    rank.restore("second")
    for name, module, attribute in (
        ("room", file_moves, "_write"),
        ("commit", host_saver, "commit"),
    ):
        before = getattr(module, attribute)
        if mesh.rank == 2:
            setattr(module, attribute, full)
        failure = rank.save(3, 3)
        setattr(module, attribute, before)
        found[f"no {name}"] = failure, rank.read(), rank.copies.newest()[0]
    found["save after"] = rank.save(3, 3), rank.read()
    # A start that was superseded had made more steps.
    rank.start(1)
    rank.save(9, 9)
    rank.backup("superseded")
    rank.start(2)
    rank.save(4, 4)
    rank.alone(
        lambda: [add(base / f"superseded/host{n}", base / f"hosts/host{n}") for n in range(3)]
    )
    found["later start"] = rank.copies.newest()[0], rank.read()
    rank.copies.remove_steps()
    found["removed"] = rank.read()
    found["left"] = sorted(path.name for path in rank.own.iterdir())
    return found


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def add(source, target):
    shutil.copytree(source, target, dirs_exist_ok=True)


def cut_short(folder):
    for file in folder.rglob("shard-00000*"):
        file.write_bytes(file.read_bytes()[:-3])


def damage(folder):
    for file in folder.rglob("shard-00000*"):
        held = bytearray(file.read_bytes())
        held[-3] ^= 1
        file.write_bytes(held)


@pytest.fixture(scope="module", params=[False, True], ids=["waited for", "background"])
def found(request, tmp_path_factory):
    return on_ranks(work, tmp_path_factory.mktemp("run"), request.param, pp=2, dp=2)


def test_a_host_has_its_files_and_those_of_the_one_before(found):
    stored = {0: {0, 1, 3}, 1: {0, 1, 2}, 2: {2, 3}}
    for rank, each in enumerate(found):
        assert each["hosts"] == OF and each["failures"] == ["", ""]
        expected = [f"2/shard-{r:05d}-of-00004.safetensors" for r in sorted(stored[OF[rank]])]
        assert each["names"] == expected


def test_any_host_may_be_lost(found):
    for each in found:
        assert [each[f"lost {host}"] for host in range(3)] == [2, 2, 2]


def test_two_that_have_one_file_may_not(found):
    for each in found:
        assert each["newest of too few"][0] is None
        assert "the copy of step 2 of generation 0: 2 of 4 files" in each["newest of too few"][1]
        assert "no copy in" in each["too few"] and "2 of 4 files are on" in each["too few"]


def test_saves_are_never_mixed(found):
    for each in found:
        assert each["saved again"] == 3
        assert each["stale"].count("2 of 4 files") + each["stale"].count("3 of 4 files") == 2


def test_damage_on_the_other_host_is_found(found):
    for each in found:
        assert "are not those that were written" in each["damaged"]
        assert "the copy of step 2 of generation 0: 3 of 4 files" in each["cut short"]


def test_a_host_that_cannot_write_leaves_the_copy_before(found):
    for each in found:
        for name in ("no room", "no commit"):
            failure, factor, newest = each[name]
            assert "rank 2: [Errno 28] No space left on device" in failure
            assert factor == 2 and newest == (0, 2)
        assert each["save after"] == ("", 3)
        assert "no copy in" in each["removed"] and each["left"] == ["latest.txt"]


def test_the_latest_start_counts_first(found):
    for each in found:
        assert each["later start"] == ((2, 4), 4)


def test_a_copy_is_whole_with_each_of_its_files():
    copy = HostCopy(generation=1, step=2, seal="", files=2, holders={0: {0, 1}})
    assert not copy.is_whole
    copy.holders[1] = {1}
    assert copy.is_whole


def test_ranks_of_the_next_host_share_the_copies():
    hosts = Hosts((0, 0, 0, 1, 2, 2))
    assert [hosts.next_rank(rank) for rank in range(6)] == [3, 3, 3, 4, 0, 1]
    assert hosts.count == 3 and [hosts.leads(rank) for rank in (0, 1, 3, 5)] == [1, 0, 1, 0]
