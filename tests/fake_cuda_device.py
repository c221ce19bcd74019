"""A tensor on a device in name only, and what the host may do with it (see ``fake_cuda``)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fake_cuda_answers import ANSWERS
from host_reads import ELSEWHERE, IN_A_STEP
from torch import Tensor

ROOT = Path(__file__).parent.parent
DEVICE = torch.device("cuda", 0)
META, CPU = torch.device("meta"), torch.device("cpu")


class DeviceFault(AssertionError):
    """What is wrong on a GPU, or makes the host wait for it."""


class WrongDevice(DeviceFault):
    """Tensors of both devices in one operation."""


class HostRead(DeviceFault):
    """A number of the device that the host reads, and so waits for."""


class BlockingCopy(DeviceFault):
    """A copy to the device from memory that is not page-locked, or not queued."""


class DeviceTensor(Tensor):
    """A tensor on the device that does not exist: one on meta, to C++."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inside = 0
    """Above 0 while an operator's own code computes shapes: there the tensor is on meta."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a fake CUDA tensor outside of fake_cuda()")

    @property
    def device(self) -> torch.device:  # pyrefly: ignore[bad-override]
        return META if DeviceTensor.inside else DEVICE

    @property
    def is_meta(self) -> bool:  # pyrefly: ignore[bad-override]
        return bool(DeviceTensor.inside)

    @property
    def is_cuda(self) -> bool:  # pyrefly: ignore[bad-override]
        return not DeviceTensor.inside

    def get_device(self) -> int:
        return 0

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def on_device(x: Tensor) -> Tensor:
    """Put a new tensor on meta on the device."""
    return Tensor._make_subclass(DeviceTensor, x, x.requires_grad)


class Machine:
    """Record of what the host did with the device."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        """By line of a package: numbers of the device that the host waited for."""
        self.copies: Counter[str] = Counter()
        """Likewise, copies to the device for which it waited."""
        self.in_step = False
        """True: such a copy is an error, and so are reads that are known elsewhere only."""
        self.operators: Counter[str] = Counter()
        """Operators on the device, and how often each was called."""
        self.pinned: set[int] = set()
        """Storages in page-locked memory."""
        self.wanted: list[torch.device | None] = []
        """Device of the results of each call of torch that is open."""


def caller() -> tuple[str, str, Mapping[str, Any]]:
    """Return the innermost frame of a package or program: its file, its line, its variables."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "packages") or path.is_relative_to(ROOT / "apps"):
            name = str(path.relative_to(ROOT)).removeprefix("packages/kenotron-")
            return name, f"{name}:{frame.f_lineno}", frame.f_locals
        if path.name.startswith("test_"):
            return path.name, f"{path.name}:{frame.f_lineno}", frame.f_locals
        frame = frame.f_back
    return "", "an unknown line", {}


def blocking(machine: Machine, what: str) -> None:
    _, line, _ = caller()
    machine.copies[line] += 1
    if machine.in_step:
        raise BlockingCopy(f"{what} at {line}: not queued from page-locked memory")


def answered(machine: Machine, what: str, x: Tensor) -> Tensor:
    """Values (CPU) for a read that is known. Raises HostRead for others."""
    file, line, around = caller()
    machine.reads[line] += 1
    if file not in IN_A_STEP and (machine.in_step or file not in ELSEWHERE):
        raise HostRead(f"{what} of {tuple(x.shape)} at {line}: the host waits for the device")
    answer = ANSWERS.get(file)
    return ones(x) if answer is None else answer(x, around)


def ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=x.dtype)


def shape_of(x: Tensor) -> Tensor:
    return x if isinstance(x, DeviceTensor) or x.is_meta else x.to(META)


def wrapped(x: Tensor) -> Tensor:
    return x if isinstance(x, DeviceTensor) or not x.is_meta else on_device(x)


@contextmanager
def inside_operator() -> Iterator[None]:
    DeviceTensor.inside += 1
    try:
        with torch._C._DisableTorchDispatch():
            yield
    finally:
        DeviceTensor.inside -= 1
