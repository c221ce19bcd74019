"""Copies on the next host, made during training, which waits for a snapshot alone."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from ckpt_cases import model

from kenotron_ckpt import HostCopies, HostSaver, host_saver, hosts_of, retention
from kenotron_ckpt.generation import Generation
from kenotron_dist import STALLED, Mesh, RankError, all_reduce, barrier, leave
from kenotron_dist.diagnosis import watch
from kenotron_dist.testing import on_ranks


def copies_of(mesh: Mesh, base: Path) -> HostCopies:
    """Copies of a mesh of which each rank is a host of its own."""
    own = base / f"host{mesh.rank}"
    own.mkdir(parents=True, exist_ok=True)
    barrier(mesh.world)
    return HostCopies(own, mesh, hosts_of(own, mesh))


def read(copies: HostCopies) -> dict[str, torch.Tensor]:
    """The floating-point tensors of the newest copy, and its step."""
    wanted = model(copies.mesh, blank=True)
    step = copies.read(lambda found: (found.load(wanted), found.manifest.step)[1])
    return {"step": torch.tensor(step)} | {key: each for key, (each, _) in wanted.items()}


def same(found: dict[str, torch.Tensor], mesh: Mesh, step: int) -> bool:
    expected = {key: tensor for key, (tensor, _) in model(mesh).items()}
    return found.pop("step") == step and all(
        torch.equal(found[key], value) for key, value in expected.items()
    )


class Gate:
    """Holds the threads of ranks back before they send, until it is opened."""

    def __init__(self) -> None:
        self.opened, self._send = threading.Event(), host_saver.move_bytes
        host_saver.move_bytes = self

    def __call__(self, *arguments):
        assert self.opened.wait(30)
        return self._send(*arguments)


def work(mesh: Mesh, base: Path) -> dict[str, object]:
    copies, found = copies_of(mesh, base / "hosts"), {}
    saver, gate = HostSaver(copies, background=True), Gate()
    # While copies are held back training communicates and changes what was saved.
    saved, state = model(mesh), {"data": [1]}
    saver.save(1, saved, state)
    saver.wait()
    state["data"].append(2)
    for tensor, _ in saved.values():
        tensor.zero_()
    found["sum"] = all_reduce(torch.ones(50_000), mesh.world)[-1].item()
    found["committed early"] = (copies.folder / "1/manifest.json").exists()
    found["early reports"] = saver.reports()
    gate.opened.set()
    saver.finish()
    (report,) = saver.reports()
    found["whole"], found["failure"] = same(read(copies), mesh, 1), report.failure
    found["state"] = copies.read(lambda copy: copy.manifest.state)
    # Of one rank only: values that are no JSON.
    saver.save(2, model(mesh), {"bad": {1}} if mesh.rank else {})
    saver.save(3, model(mesh), {})
    saver.finish()
    bad, good = saver.reports()
    found["bad"], found["good"] = bad.failure, (good.failure, same(read(copies), mesh, 3))
    # A copy that cannot be removed: named, and tried again.
    real = retention.remove_checkpoint

    def busy(store):
        if store.name == "3":
            raise OSError(f"{store}: busy")
        real(store)

    if mesh.rank:
        retention.remove_checkpoint = busy
    saver.save(4, model(mesh), {})
    saver.finish()
    retention.remove_checkpoint = real
    (report,) = saver.reports()
    found["busy"], found["left"] = report.follow_up, sorted(p.name for p in copies.folder.iterdir())
    saver.save(5, model(mesh), {})
    saver.finish()
    found["tried again"] = saver.reports()[0].follow_up, (copies.folder / "3").exists()
    saver.close()
    return found | superseded(mesh, base)


def superseded(mesh: Mesh, base: Path) -> dict[str, object]:
    """Save a step as a start of which a later one has saved that step."""
    copies = copies_of(mesh, base / "fenced")
    lock = base / "writer.lock"
    late, early = (Generation(lock, number, f"{number:016x}") for number in (2, 1))
    if mesh.rank == 0:
        lock.write_text(late.line)
    barrier(mesh.world)
    with HostSaver(copies, late if mesh.rank == 0 else None, background=True) as saver:
        saver.save(7, model(mesh), {})
    saver = HostSaver(copies, early if mesh.rank == 0 else None, background=True)
    saver.save(7, model(mesh), {})
    try:
        saver.save(8, model(mesh), {})
        said = ""
    except ValueError as error:
        said = str(error)
    return {"superseded": said, "fenced": copies.newest()[0]}


def test_training_waits_for_the_snapshot_alone(tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(work, tmp_path, dp=3)):
        assert found["sum"] == 3 and not found["committed early"] and not found["early reports"]
        assert found["whole"] and not found["failure"] and found["state"] == {"data": [1]}
        assert "rank 1, 2: state is not made of JSON values" in found["bad"]
        assert found["good"] == ("", True)
        assert all(f"rank {each}: {tmp_path}" in found["busy"] for each in (1, 2))
        assert ("3" in found["left"]) == (rank > 0) and found["tried again"] == ("", False)
        assert "has been taken over by a later start" in found["superseded"]
        assert found["fenced"] == (2, 7)


def stops(mesh: Mesh, base: Path) -> None:
    copies = copies_of(mesh, base)
    send = host_saver.move_bytes

    def stop(*arguments):
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return send(*arguments)

    host_saver.move_bytes = stop

    def found(report):
        (base / "report").write_text(str(report))
        leave(STALLED)

    with watch(mesh, limit=timedelta(seconds=3), on_stall=found):
        saver = HostSaver(copies, background=True)
        saver.save(1, model(mesh), {})
        saver.finish()


def test_a_rank_that_hangs_while_others_wait_for_its_copy_is_found(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="it waited for a rank that its report") as error:
        on_ranks(stops, tmp_path, dp=2, seconds=30)
    assert error.value.rank == 0
    assert "rank 1 is stopped or dead" in (tmp_path / "report").read_text()
