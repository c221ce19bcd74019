"""Host tensors of exactly the size that is asked for, page-locked where an accelerator copies them.

The pinned allocator of torch rounds blocks up to powers of two; of state that fills most of a host
this may be too much. Memory that is registered with the driver takes its own size.
"""

from __future__ import annotations

import itertools
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, as those of torch do."""
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""


class _Pages(mmap.mmap):
    """Zeros, page-locked from ``lock`` until nothing refers to them."""

    address: int | None = None
    runtime: Any = None

    def lock(self, memory: Tensor) -> None:
        """Register the pages, which are those of ``memory``, with the driver."""
        memory.zero_()  # the system hands pages out on first touch
        address, nbytes = memory.data_ptr(), memory.nbytes
        # That of the accelerator of this process: CUDA's, or HIP's by the same names.
        self.runtime = torch.get_device_module().cudart()
        if error := int(self.runtime.cudaHostRegister(address, nbytes, _PORTABLE)):
            raise RuntimeError(
                f"optimizer.offload: true was given, but {nbytes} bytes of host memory cannot be "
                f"page-locked (cudaHostRegister: error {error}): set it to false, or raise the "
                "limit of memory of this process"
            )
        self.address = address

    def __del__(self) -> None:
        # At the end of the process the driver may be gone: then the system releases all.
        if self.address is not None and not sys.is_finalizing():
            self.runtime.cudaHostUnregister(self.address)


def host_tensors(like: Sequence[Tensor], *, pin: bool) -> list[Tensor]:
    """Return zeros in host memory, of the shapes and dtypes of ``like``.

    Page-locked ones are in one allocation, which lives as long as one of them.

    Args:
        like: tensors whose storage may be empty.
        pin: whether the memory is page-locked.

    Raises:
        RuntimeError: the driver does not lock so much.
    """
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in like]
    if not pin or not sum(sizes):
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in like]
    pages = _Pages(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    pages.lock(memory)
    starts = itertools.accumulate(sizes, initial=0)
    return [
        memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like, strict=False)
    ]
