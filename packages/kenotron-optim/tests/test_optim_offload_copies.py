"""Offload's copies on a stand-in for an accelerator: by bucket, page-locked, and waited for."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_optim_offload import build, records, step_once, values
from torch import Tensor

from kenotron_dist import Mesh
from kenotron_optim import SlicedOptimizer, sliced_optimizer
from kenotron_optim.host_tensors import host_tensors
from kenotron_optim.offload import HostState

CASE = ("fused", 1, torch.bfloat16, torch.float32)
GARBAGE = 0xA5


class Accelerator:
    """The CUDA runtime, a stream and its copies. Tensors of the device are ordinary CPU tensors.

    What is copied to the host holds garbage until somebody waits for the stream.
    """

    def __init__(self, error: int = 0) -> None:
        self.error, self.locked = error, dict[int, int]()
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.copies: list[tuple[str, int]] = []
        """(direction, bytes) of each group of copies."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy = torch._foreach_copy_
        monkeypatch.setattr(torch, "_foreach_copy_", self.copy)
        monkeypatch.setattr(torch, "get_device_module", lambda *_: self)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: self)
        device = torch.device("cuda", 3)
        monkeypatch.setattr(sliced_optimizer, "HostState", lambda _: HostState(device))

    def is_available(self) -> bool:
        """What a build of torch for CUDA asks."""
        return False

    def cudart(self) -> Accelerator:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.error:
            self.locked[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def record_event(self) -> Accelerator:
        return self

    def synchronize(self) -> None:
        for host, arriving in self.queue:
            host.copy_(arriving)
        self.queue.clear()

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], non_blocking: bool = False
    ) -> None:
        if not non_blocking:  # within the device
            return self._copy(list(targets), list(sources))
        nbytes = sum(x.nbytes for x in targets)
        if all(map(self.is_locked, targets)):
            self.copies.append(("to host", nbytes))
            for host, source in zip(targets, sources, strict=True):
                self.queue.append((host, source.detach().clone()))
                ctypes.memset(host.data_ptr(), GARBAGE, host.nbytes)
        else:
            assert all(map(self.is_locked, sources))
            self.copies.append(("to device", nbytes))
            self.synchronize()  # a stream keeps the order
            self._copy(list(targets), list(sources))
        return None

    def is_locked(self, x: Tensor) -> bool:
        ends = ((start, start + size) for start, size in self.locked.items())
        return any(a <= x.data_ptr() and x.data_ptr() + x.nbytes <= b for a, b in ends)


def test_each_bucket_goes_there_and_back_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, device = Mesh.connect(), Accelerator()
    plain = build(mesh, *CASE, False)
    device.install(monkeypatch)
    made = build(mesh, *CASE, True)
    masters = [4 * bucket.width for bucket in made[1].buckets]
    assert device.copies == [("to host", size) for size in masters] and len(masters) > 5
    for step in range(3):
        for each in (plain, made):
            device.copies.clear()
            step_once(mesh, each, step)
        # The first update makes the state, which is only copied back.
        there = [size if step == 0 else 3 * size for size in masters]
        pairs = zip(there, masters, strict=True)
        assert device.copies == [
            copy for a, b in pairs for copy in (("to device", a), ("to host", 3 * b))
        ]
        assert device.queue  # nobody has waited
    want, found = values(plain), values(made)
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    assert sum(device.locked.values()) >= 3 * sum(masters)
    del made, found, each
    gc.collect()
    assert not device.locked


def reads(optimizer: SlicedOptimizer, how: str) -> list[float]:
    """All masters, read in one of the ways."""
    if how == "state":
        return torch.cat([x for n, x in records(optimizer).items() if "master" in n]).tolist()
    if how == "wanted":
        found = {key: x for key, (x, _) in optimizer.wanted().items() if key.startswith("master")}
        return torch.cat(list(found.values())).tolist()
    optimizer.reload()  # masters become the rounded values of the parameters
    return torch.cat([x for n, x in records(optimizer).items() if "master" in n]).tolist()


@pytest.mark.parametrize("how", ["state", "wanted", "reload"])
def test_the_host_reads_what_has_arrived(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    mesh, device = Mesh.connect(), Accelerator()
    plain = build(mesh, *CASE, False)
    device.install(monkeypatch)
    made = build(mesh, *CASE, True)
    for each in (plain, made):
        step_once(mesh, each, 0)
    assert device.queue and reads(made[2], how) == reads(plain[2], how)
    for each in (plain, made):
        each[2].publish()
        step_once(mesh, each, 1)
    want, found = values(plain), values(made)
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


def test_memory_that_the_driver_does_not_lock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerator(error=2).install(monkeypatch)
    words = (
        r"cannot page-lock 64 bytes of host memory \(cudaHostRegister: error 2\): "
        r"set optimizer.offload to false, or raise the limit of memory"
    )
    with pytest.raises(RuntimeError, match=words):
        host_tensors([torch.ones(3)], pin=True)


def test_host_tensors_have_shapes_dtypes_and_places_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Accelerator()
    device.install(monkeypatch)
    like: list[Any] = [torch.ones(3, 5), torch.ones(7).bfloat16(), torch.ones(0), torch.ones(1)]
    for pin in (False, True):
        found = host_tensors(like, pin=pin)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in like]
        assert [device.is_locked(x) for x in found if x.numel()] == [pin] * 3
        for i, tensor in enumerate(found):
            tensor.fill_(i)
        assert [set(x.flatten().tolist()) for x in found] == [{0.0}, {1.0}, set(), {3.0}]
    assert device.locked == {found[0].data_ptr(): 64 * 3}
