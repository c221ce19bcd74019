"""Keys and values of a text that goes on, kept in memory of fixed size.

Shapes: B texts, S new tokens of each, L the longest text, G kv heads, K features of a head; ``/t``
is divided by tp size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers of this rank, slot i of a text for its token i.

    Each layer's memory is made when it first comes: 2 (B, G/t, L, K). What lies in slots after a
    token's place is never read, so shorter texts of a batch may be padded on their right.

    Arguments: L.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.used = 0
        """Slots in use by the longest text."""
        self.alike = True
        """Whether all texts of the batch are equally long."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, used: int, *, alike: bool) -> None:
        """Say how many slots are in use after the coming tokens. Raises ValueError beyond L."""
        if used > self.length:
            raise ValueError(
                f"the cache has room for texts of {self.length} tokens, and {used} are to be kept: "
                "make it longer"
            )
        self.used, self.alike = used, alike

    def extend(
        self, layer: int, k_BGSK: Tensor, v_BGSK: Tensor, positions_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep what is new, and return all that is kept: (B, G/t, used, K) each, views."""
        if layer not in self._layers:
            batch, heads, _, width = k_BGSK.shape
            room = [x.new_zeros(batch, heads, self.length, width) for x in (k_BGSK, v_BGSK)]
            self._layers[layer] = (room[0], room[1])
        new = k_BGSK.shape[2]
        for kept, coming in zip(self._layers[layer], (k_BGSK, v_BGSK), strict=True):
            if self.alike or new == self.used:
                kept[:, :, self.used - new : self.used] = coming
            else:
                rows = torch.arange(len(coming), device=coming.device)[:, None]
                kept.transpose(1, 2)[rows, positions_BS] = coming.transpose(1, 2)
        keys, values = self._layers[layer]
        return keys[:, :, : self.used], values[:, :, : self.used]

    def seen(self, positions_BS: Tensor, window: int | None) -> Tensor | None:
        """Which slots each new token sees, bool (B, 1, S, used); None: all of them.

        A window counts the token itself.
        """
        if self.alike and window is None and positions_BS.shape[1] == 1:
            return None
        slots = torch.arange(self.used, device=positions_BS.device)
        place = positions_BS[:, None, :, None]
        mask = slots <= place
        return mask if window is None else mask & (slots > place - window)
