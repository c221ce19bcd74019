"""Page-locked host memory of exactly the size that was asked for.

The pinned allocator of torch rounds blocks up to powers of two and keeps those that are freed: a
pool could take twice its limit, and more after it was resized. Memory that is registered with the
driver takes its own size, and goes back to the system when it is released.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""


class PinnedMemory:
    """Page-locked memory, released when this object is collected: keep it while copies run.

    Args:
        nbytes: Its size, at least 1.

    Raises:
        RuntimeError: The driver does not lock so much.
    """

    def __init__(self, nbytes: int) -> None:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8)
        """All of it (nbytes,), uint8, zero."""
        self.memory.zero_()  # the system hands pages out on first touch
        error = int(_runtime().cudaHostRegister(self.memory.data_ptr(), nbytes, _PORTABLE))
        if error:
            raise RuntimeError(
                f"cannot page-lock {nbytes} bytes of host memory (cudaHostRegister: error "
                f"{error}): make pool_bytes (host_cache_size) smaller, or pin (pin_host_cache) "
                "false"
            )
        # The arguments keep the memory until it is no longer registered. At the end of the process
        # the driver may be gone before: then the system releases all.
        finalizer = weakref.finalize(self, _release, self.memory)
        finalizer.atexit = False  # pyrefly: ignore[missing-attribute]


def _release(memory: Tensor) -> None:
    _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    """The runtime of the accelerator that this process uses: CUDA's, or HIP's by the same names."""
    return torch.get_device_module().cudart()
