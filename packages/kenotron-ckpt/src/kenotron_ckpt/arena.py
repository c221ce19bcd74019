"""Host memory for snapshots: taken once, touched, used again for every save.

Fresh memory costs six times the copy: the system hands it out page by page, on first touch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kenotron_ckpt.cut import Block
from kenotron_ckpt.parts import Part


class Arena:
    """Slots that each hold one part at a time.

    With fewer slots than parts, part ``i`` comes to lie in slot ``i % len(slots)`` once what was
    there is on the disk.
    """

    def __init__(self) -> None:
        self.slots: list[Tensor] = []

    def fit(self, parts: Sequence[Part], limit: int, pin: bool) -> None:
        """Have room for ``parts``, within ``limit`` bytes. What is large enough is kept.

        Arguments: the parts; how many bytes all slots may have together, at least those of the
        largest part; whether an accelerator copies to the slots (they are then page-locked).
        """
        sizes: list[int] = []
        largest = max((part.nbytes for part in parts), default=0)
        if sum(part.nbytes for part in parts) <= limit:
            sizes = [part.nbytes for part in parts]
        elif largest:
            sizes = [largest] * max(1, limit // largest)
        held = [slot.numel() for slot in self.slots]
        if len(held) >= len(sizes) and all(h >= s for h, s in zip(held, sizes, strict=False)):
            del self.slots[len(sizes) :]  # they may be too small for a part that comes round
            return
        self.slots = []  # give back before taking
        for size in sizes:
            slot = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
            self.slots.append(slot.zero_())

    def hosts(self, index: int, part: Part) -> list[Tensor]:
        """Where the blocks of the part with this index go: contiguous tensors in its slot."""
        slot = self.slots[index % len(self.slots)]
        places = zip(part.blocks, part.offsets, strict=True)
        return [_place(slot, block, offset) for block, offset in places]


def _place(slot: Tensor, block: Block, offset: int) -> Tensor:
    return slot[offset : offset + block.nbytes].view(block.view.dtype).view(block.box.shape)
