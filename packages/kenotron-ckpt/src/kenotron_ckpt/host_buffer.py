"""Host memory for snapshots: taken once, touched, used again for every save.

Fresh memory costs six times the copy: the system hands it out page by page, on first touch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kenotron_ckpt.blocks import OwnBlock
from kenotron_ckpt.part_files import PartFile
from kenotron_dist import page_locked

_ALIGNMENT = 64
"""Slots in page-locked memory begin at multiples of this many bytes, as tensors of torch do."""
_ADVICE = "make pool_bytes (host_cache_size) smaller, or pin (pin_host_cache) false"


class HostBuffer:
    """Slots that each hold one part at a time.

    With fewer slots than parts, part ``i`` comes to lie in slot ``i % len(slots)`` once what was
    there is on the disk.
    """

    def __init__(self) -> None:
        self.slots: list[Tensor] = []

    def fit(self, parts: Sequence[PartFile], limit: int, pin: bool) -> None:
        """Have room for ``parts``, within ``limit`` bytes. What is large enough is kept.

        Args:
            parts: to hold.
            limit: bytes that all slots may have together, at least those of the largest part.
            pin: page-locked slots, for copies by an accelerator.
        """
        sizes = [part.nbytes for part in parts]
        steps = _steps(sizes, pin)
        if sum(steps) > limit:
            largest = max(sizes)
            sizes = [largest] * (1 + max(0, limit - largest) // max(steps))
            steps = _steps(sizes, pin)
        held = [slot.numel() for slot in self.slots]
        if len(held) >= len(sizes) and all(h >= s for h, s in zip(held, sizes, strict=False)):
            del self.slots[len(sizes) :]  # they may be too small for a part that comes round
            return
        self.slots = []  # give back before taking
        if pin and sizes:
            starts = list(itertools.accumulate(steps[:-1], initial=0))
            memory = page_locked(starts[-1] + sizes[-1], _ADVICE)
            places = zip(starts, sizes, strict=True)
            self.slots = [memory[start : start + size] for start, size in places]
            return
        for size in sizes:
            slot = torch.empty(size, dtype=torch.uint8)
            self.slots.append(slot.zero_())

    def hosts(self, index: int, part: PartFile) -> list[Tensor]:
        """Return the part's blocks, each of its block's shape: contiguous tensors in its slot."""
        slot = self.slots[index % len(self.slots)]
        places = zip(part.blocks, part.offsets, strict=True)
        return [_place(slot, block, offset) for block, offset in places]


def _place(slot: Tensor, block: OwnBlock, offset: int) -> Tensor:
    return slot[offset : offset + block.nbytes].view(block.view.dtype).view(block.box.shape)


def _steps(sizes: Sequence[int], pin: bool) -> list[int]:
    """Bytes from the beginning of each slot to that of the next one."""
    unit = _ALIGNMENT if pin else 1  # slots that are not page-locked are tensors of their own
    return [-(-size // unit) * unit for size in sizes]
