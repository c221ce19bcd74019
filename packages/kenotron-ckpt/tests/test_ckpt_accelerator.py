"""Saving from an accelerator, on a stand-in whose work runs as late, or as early, as it may."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ckpt_accelerator import DEFAULT, GARBAGE, LAZY, SIDE, Accelerator, Event, HostMemory, Stream
from ckpt_checks import vectors

from kenotron_ckpt import Saver, load, reader, threads
from kenotron_ckpt.blocks import blocks_of
from kenotron_ckpt.host_buffer import HostBuffer
from kenotron_ckpt.part_files import PartFile, plan_parts
from kenotron_ckpt.save_job import SaveJob
from kenotron_dist import Mesh, MeshConfig, views_of
from kenotron_dist.placement import TensorLayout

KINDS = (LAZY, DEFAULT, SIDE)
POOLS = (300, 900, 1 << 20)


def round_trip(
    folder: Path, device: Accelerator, pool_bytes: int, pin: bool = False, threads: int = 2
) -> None:
    """Three saves beside updates: each file holds the values of its moment, and can be resumed."""
    mesh = Mesh.connect(device=device.device)
    live = vectors(6)
    due = {key: tensor.clone() for key, (tensor, _) in live.items()}
    options = {"pool_bytes": pool_bytes, "threads": threads, "file_bytes": 1000, "pin": pin}
    with Saver(folder, mesh, **options) as saver:
        for step in range(1, 4):
            device.queue(lambda: [tensor.add_(1) for tensor, _ in live.values()])
            saved = {key: tensor.add_(1).clone() for key, tensor in due.items()}
            if pool_bytes == POOLS[-1]:
                device.gate.clear()  # nobody waits for a copy before the update is queued
            saver.save(step, live, {}, volatile=["v1"])
            device.queue(lambda: live["v1"][0].zero_())
            due["v1"].zero_()
            saver.wait()
            device.queue(lambda: [tensor.mul_(-1) for tensor, _ in live.values()])
            due = {key: tensor.mul(-1) for key, tensor in due.items()}
            device.gate.set()
            saver.finish()
            blank = {key: (torch.zeros_like(t), layout) for key, (t, layout) in live.items()}
            assert load(folder, blank, mesh).step == step
            assert all(torch.equal(blank[key][0], value) for key, value in saved.items()), step
        device.synchronize()
        assert all(torch.equal(live[key][0], value) for key, value in due.items())


@pytest.mark.parametrize("eager", KINDS)
@pytest.mark.parametrize("pool_bytes", POOLS)
@pytest.mark.parametrize("pin", [True, False])
def test_the_files_hold_the_moment_of_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager: str, pool_bytes: int, pin: bool
) -> None:
    device, host = Accelerator(eager), HostMemory()
    device.install(monkeypatch)
    host.install(monkeypatch)
    round_trip(tmp_path, device, pool_bytes, pin)
    assert device.wrong == []
    gc.collect()
    assert not host.registered and (host.peak > 0) is pin


def test_locked_memory_is_free_when_a_saver_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread has let go of the last save, however late it comes to it."""
    device, host, real = Accelerator(), HostMemory(), SaveJob.run

    def late(job: SaveJob) -> None:
        real(job)
        time.sleep(0.5)

    device.install(monkeypatch)
    host.install(monkeypatch)
    monkeypatch.setattr(SaveJob, "run", late)
    with Saver(tmp_path, Mesh.connect(device=device.device)) as saver:
        saver.save(1, vectors(2), {})
    assert not host.registered and host.peak


@pytest.mark.parametrize(
    ("place", "name", "eager", "pool_bytes"),
    [
        (Stream, "wait_stream", LAZY, POOLS[-1]),
        (Stream, "wait_stream", SIDE, POOLS[-1]),
        (Event, "synchronize", LAZY, POOLS[-1]),
        (Event, "synchronize", DEFAULT, 300),
        (Stream, "wait_event", DEFAULT, POOLS[-1]),
    ],
)
def test_a_wait_that_is_missing_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: type, name: str, eager: str,
    pool_bytes: int,
) -> None:  # fmt: skip
    device = Accelerator(eager)
    device.install(monkeypatch)
    monkeypatch.setattr(place, name, lambda *_: None)
    with pytest.raises(AssertionError):
        round_trip(tmp_path, device, pool_bytes)


@pytest.mark.parametrize("count", [1, 2])
def test_every_thread_that_saves_sets_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: threading.Event, count: int
) -> None:
    device = Accelerator()
    device.install(monkeypatch)
    round_trip(tmp_path, device, 300, threads=count)
    assert device.wrong == []
    assert {"MainThread", "saver"} <= device.threads
    assert len(device.threads) >= 1 + count


def test_a_target_holds_garbage_until_its_copy_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Accelerator()
    device.install(monkeypatch)
    target = torch.zeros(3, dtype=torch.uint8)
    torch._foreach_copy_([target], [torch.ones(3, dtype=torch.uint8)], non_blocking=True)
    assert target.tolist() == [GARBAGE] * 3
    device.synchronize()
    assert target.tolist() == [1] * 3


def test_a_thread_that_does_not_set_its_device_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Accelerator()
    device.install(monkeypatch)
    monkeypatch.setattr(device, "set_device_index", lambda index: None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    round_trip(tmp_path, device, 300)
    assert any("copy with device 0" in text for text in device.wrong)


@pytest.mark.parametrize("name", ["cuda", "cuda:3"])
def test_a_new_thread_sets_the_device_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    device, found = Accelerator(), []
    device.install(monkeypatch)
    begin = threads.set_device(torch.device(name))

    def work() -> None:
        begin()
        found.append(device.current_device_index())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [3]
    threads.set_device(torch.device("cpu"))()


def test_threads_that_read_to_a_device_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, found = Accelerator(), []
    device.install(monkeypatch)
    monkeypatch.setattr(
        reader, "_read_file", lambda *_: found.append(device.current_device_index())
    )
    for where in ("cpu", "cuda:3"):
        read = SimpleNamespace(
            piece=SimpleNamespace(file="a"), target=SimpleNamespace(device=torch.device(where))
        )
        reader.fill(tmp_path, [read] * 4)
    assert found == [0] * 4 + [3] * 4


def parts_of(*sizes: int) -> list[PartFile]:
    """A part for each size in bytes."""
    tensors = {
        f"w{i}": (torch.zeros(n, dtype=torch.uint8), TensorLayout(f"w{i}", (n,)))
        for i, n in enumerate(sizes)
    }
    view = views_of(MeshConfig(), 0)
    return [plan_parts([block], 1 << 30)[0] for block in blocks_of(tensors, view)]


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [((5000, 5000, 9000), 20_000), ((5000,) * 7, 20_000), ((5000, 1), 5001), ((4097,) * 3, 12_500)],
)
def test_locked_memory_is_never_more_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], limit: int
) -> None:
    host, arena = HostMemory(), HostBuffer()
    host.install(monkeypatch)
    arena.fit(parts_of(*sizes), limit, pin=True)
    assert max(slot.numel() for slot in arena.slots) == max(sizes)
    assert all(slot.data_ptr() % 64 == 0 for slot in arena.slots)
    assert max(sizes) <= host.peak <= limit
    arena.fit(parts_of(limit - 64), limit, pin=True)  # another size: what was held goes first
    assert host.peak <= limit
    del arena
    assert not host.registered


def test_memory_stays_locked_while_the_slots_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    host, arena = HostMemory(), HostBuffer()
    host.install(monkeypatch)
    arena.fit(parts_of(5000), 1 << 20, pin=True)
    arena.fit(parts_of(4000), 1 << 20, pin=True)  # it fits in what there is
    assert list(host.registered.values()) == [5000]
    arena.fit([], 1 << 20, pin=True)
    assert arena.slots == []


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostMemory(error=2)
    host.install(monkeypatch)
    words = (
        r"cannot page-lock 5000 bytes of host memory \(cudaHostRegister: error 2\): "
        r"make pool_bytes \(host_cache_size\) smaller, or pin \(pin_host_cache\) false"
    )
    with pytest.raises(RuntimeError, match=words):
        HostBuffer().fit(parts_of(5000), 1 << 20, pin=True)
