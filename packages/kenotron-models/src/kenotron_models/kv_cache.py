"""Cache of a text that is continued, in memory of fixed size: keys, values and states of layers.

Shapes: B texts, S new tokens of each, L the longest text, G kv heads, K features of a head, C
channels; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers of this rank, slot i of a text for its token i, and states.

    A mixer that has one state for all earlier tokens keeps it under a key of its own (``state``,
    ``keep``, ``tokens_before``).

    Each layer's memory is made when it first comes: 2 (B, G/t, L, K). What lies in slots after a
    token's place is never read, so shorter texts of a batch may be padded on their right.

    Arguments: L.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.used = 0
        """Slots in use by the longest text."""
        self.equal_lengths = True
        """True where all texts of the batch are equally long."""
        self.others: dict[Hashable, Any] = {}
        """Caches of models whose layers have one of another library."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._states: dict[Hashable, Tensor] = {}

    def begin(self, used: int, *, equal_lengths: bool) -> None:
        """Say how many slots are in use after the coming tokens. Raises ValueError beyond L."""
        if used > self.length:
            raise ValueError(
                f"the cache has room for texts of {self.length} tokens, and {used} are to be kept: "
                "make it longer"
            )
        self.used, self.equal_lengths = used, equal_lengths

    def extend(self, layer: int, k_BSGK: Tensor, v_BSGK: Tensor, positions_BS: Tensor) -> None:
        """Keep what is new."""
        batch, new, heads, width = k_BSGK.shape
        if layer not in self._layers:
            room = [x.new_zeros(batch, heads, self.length, width) for x in (k_BSGK, v_BSGK)]
            self._layers[layer] = (room[0], room[1])
        for kept, coming in zip(self._layers[layer], (k_BSGK, v_BSGK), strict=True):
            if self.equal_lengths or new == self.used:
                kept[:, :, self.used - new : self.used] = coming.transpose(1, 2)
            else:
                rows = torch.arange(batch, device=coming.device)[:, None]
                kept.transpose(1, 2)[rows, positions_BS] = coming

    def kept(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that are in use: 2 (B, G/t, used, K)."""
        keys, values = (each[:, :, : self.used] for each in self._layers[layer])
        return keys, values

    def seen(self, positions_BS: Tensor, window: int | None) -> Tensor | None:
        """Return the slots that each new token attends to, bool (B, 1, S, used); None: all of them.

        A window counts the token itself.
        """
        every = self.equal_lengths and positions_BS.shape[1] == 1
        if every and (window is None or window >= self.used):
            return None
        slots = torch.arange(self.used, device=positions_BS.device)
        place = positions_BS[:, None, :, None]
        mask = slots <= place
        return mask if window is None else mask & (slots > place - window)

    def state(self, key: Hashable) -> Tensor | None:
        """Return what was kept, (B, ...), under a key, such as (layer, name); None: nothing yet."""
        return self._states.get(key)

    def keep(self, key: Hashable, state: Tensor) -> None:
        """Keep a state of all texts, (B, ...), after their last real token, under a key."""
        self._states[key] = state.detach()

    def tokens_before(
        self, key: Hashable, x_BSC: Tensor, width: int, padding_BS: Tensor | None
    ) -> Tensor:
        """Return the ``width`` features before the new ones, and keep the last that are real.

        Args:
            key: of the features.
            x_BSC: the new ones (B, S, C/t).
            width: tokens.
            padding_BS: which of the new tokens are padding, on the right of their texts, bool;
                None: none are.

        Returns:
            (B, width, C/t), zeros before the begin of a text.
        """
        batch, new, channels = x_BSC.shape
        before = self._states.get(key)
        if before is None:
            before = x_BSC.new_zeros(batch, width, channels)
        row = torch.cat([before, x_BSC], 1)
        ends = torch.full((batch,), new, device=row.device)
        if padding_BS is not None:
            ends = (~padding_BS).sum(1)
        places = ends[:, None] + torch.arange(width, device=row.device)
        rows = torch.arange(batch, device=row.device)[:, None]
        self.keep(key, row[rows, places])
        return before
