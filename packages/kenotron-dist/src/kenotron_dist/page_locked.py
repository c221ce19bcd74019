"""Page-locked host memory of exactly the size that was asked for.

The pinned allocator of torch rounds blocks up to powers of two and keeps those that are freed:
state that fills most of a host may take twice its size. Memory that is registered with the driver
takes its own size, and goes back to the system when nothing refers to it.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""


class _Pages(mmap.mmap):
    """Zeros, page-locked from ``lock`` until nothing refers to them."""

    address: int | None = None
    runtime: Any = None

    def lock(self, memory: Tensor, advice: str) -> None:
        """Register the pages, which are those of ``memory``, with the driver."""
        memory.zero_()  # the system hands pages out on first touch
        # That of the accelerator of this process: CUDA's, or HIP's by the same names.
        self.runtime = torch.get_device_module().cudart()
        if error := int(self.runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)):
            raise RuntimeError(
                f"cannot page-lock {memory.nbytes} bytes of host memory (cudaHostRegister: error "
                f"{error}): {advice}"
            )
        self.address = memory.data_ptr()

    def __del__(self) -> None:
        # At the end of the process the driver may be gone: then the system releases all.
        if self.address is not None and not sys.is_finalizing():
            self.runtime.cudaHostUnregister(self.address)


def page_locked(nbytes: int, advice: str) -> Tensor:
    """Return zeros (nbytes,), uint8, page-locked as long as a tensor refers to their storage.

    Args:
        nbytes: size, at least 1.
        advice: ends the error: what may be changed.

    Raises:
        RuntimeError: the driver does not lock so much.
    """
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    pages.lock(memory, advice)
    return memory
