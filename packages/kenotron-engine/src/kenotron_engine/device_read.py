"""The one read of the device that a step makes: all numbers in one copy, at its end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DeviceRead:
    """Numbers on their way from a device to the host.

    The copy goes to pinned memory and is queued behind the work of the step: this process continues
    until it calls ``wait``. On a CPU there is nothing to copy.

    Args:
        values: tensors of any shape and of a real or integer dtype, on one device. Integers must be
            below 2^53.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._sizes = [value.numel() for value in values]
        flat = torch.cat([value.detach().reshape(-1).double() for value in values])
        self._event: torch.Event | None = None
        self._host = torch.ones(flat.shape) if flat.is_meta else flat
        if flat.device.type not in ("cpu", "meta"):
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.Event(flat.device)
            self._event.record(torch.accelerator.current_stream(flat.device))

    def wait(self) -> list[list[float]]:
        """Block until the device has come to the copy; the numbers of each tensor, flattened."""
        if self._event is not None:
            self._event.synchronize()
        return [part.tolist() for part in self._host.split(self._sizes)]
