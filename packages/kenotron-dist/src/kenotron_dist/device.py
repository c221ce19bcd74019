"""The device of a rank, the backend that goes with it, and marks in the device's queue."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron_dist.fake_world import FAKE, FAKE_NCCL


class Mark(Protocol):
    """A place in a queue of work."""

    def is_completed(self) -> bool:
        """Return whether everything queued before it is done."""
        ...


class _NoMark:
    """A place in the queue of a device that does nothing."""

    def is_completed(self) -> bool:
        return True


class _EventMark:
    """An event on the current stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device)
        self._event.record(torch.accelerator.current_stream(device))

    def is_completed(self) -> bool:
        return self._event.query()


def mark_queue(backend: str, device: torch.device) -> Mark:
    """Return a mark at the present end of the queue of ``device``, on which ``backend`` runs.

    A mark holds no tensor. Keeping a ``Work`` of NCCL instead would keep its outputs alive.
    """
    if backend == FAKE:
        return _NoMark()
    if backend == FAKE_NCCL:
        from kenotron_dist.proof.fake_work import FakeMark

        return FakeMark()
    return _EventMark(device)


def bind_thread(device: torch.device) -> None:
    """Make ``device`` the current one of this thread: new threads begin with device 0.

    Any call to an accelerator's runtime would open a context of some 0.5 GB there.
    """
    if device.type not in ("cpu", "meta"):
        torch.accelerator.set_device_index(device.index or 0)


def indexed(device: torch.device) -> torch.device:
    """Return the device with its number: other threads have another current one."""
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of any shape on a device; a copy from the host to a GPU is only queued.

    It is made from page-locked memory: with other memory this process would wait for the device.
    """
    if x.device.type != "cpu" or device.type == "cpu":
        return x.to(device)
    source = x if device.type == "meta" else x.pin_memory()
    return source.to(device, non_blocking=True)


def default_device(backend: str) -> torch.device:
    """Return the current accelerator under nccl, meta in a fake world, else the CPU."""
    if backend == FAKE:
        return torch.device("meta")
    if backend == "nccl":
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None  # nccl exists only with one
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def choose_device(
    device: str | None, backend: str | None, gpus: int, needed: int, problem: str = ""
) -> tuple[str, str]:
    """Device type and backend: cuda and nccl when there are GPUs enough, else cpu and gloo. Pure.

    Args:
        device: type that was asked for, or None.
        backend: backend that was asked for, or None.
        gpus: number of visible GPUs.
        needed: GPUs that the local ranks need.
        problem: reason why there is no GPU (``gpu_problem``).

    Raises:
        ValueError: an unknown name, a combination that cannot work, or too few GPUs.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device {device!r} is neither 'cpu' nor 'cuda'")
    if backend not in (None, "gloo", "nccl", FAKE_NCCL):
        raise ValueError(f"backend {backend!r} is neither 'gloo' nor 'nccl'")
    if backend == FAKE_NCCL and device != "cuda":
        return "cpu", FAKE_NCCL
    if device == "cpu" and backend == "nccl":
        raise ValueError("backend 'nccl' needs device 'cuda': use 'gloo' on the cpu")
    wants_gpu = device == "cuda" or backend == "nccl"
    if wants_gpu and gpus < needed:
        ranks = f"{needed} local ranks need as many GPUs" if needed > 1 else "a rank needs a GPU"
        fewer = "start fewer processes on this host, or " if needed > 1 else ""
        raise ValueError(
            f"{ranks}, but {gpus} can be seen{problem and f' ({problem})'}: {fewer}choose device "
            "'cpu'"
        )
    if wants_gpu or (device is None and backend is None and gpus >= needed):
        return "cuda", backend or "nccl"
    return "cpu", "gloo"


def register_backend(backend: str) -> None:
    """Make a backend of this package known to torch.distributed; others are known already.

    Raises:
        ValueError: the backend is a proof tool, and this package was installed from a wheel.
    """
    if backend != FAKE_NCCL:
        return
    try:
        from kenotron_dist.proof.fake_nccl import register_fake_nccl
    except ModuleNotFoundError as error:
        raise ValueError(
            f"backend {FAKE_NCCL!r} is not in the wheel of kenotron-dist: install it from its "
            "sources (pip install -e), or choose gloo"
        ) from error
    register_fake_nccl()


def visible_gpus() -> int:
    """GPUs that this process may use with NCCL; does not touch them."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda" or not dist.is_nccl_available():
        return 0
    return torch.accelerator.device_count()


def gpu_problem() -> str:
    """Return why ranks can use no GPU here; empty where they can. Does not touch them."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda":
        return f"torch {torch.__version__} is built without CUDA: install a build that has it"
    seen = torch.accelerator.device_count()
    if not seen:
        return "torch sees none: look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
    if not dist.is_nccl_available():
        return (
            f"torch sees {seen}, but is built without NCCL, by which ranks communicate: install a "
            "build that has it"
        )
    return ""
