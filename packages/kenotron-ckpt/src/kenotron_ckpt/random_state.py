"""The random streams of a process, as JSON: torch's, its device's, Python's and NumPy's."""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """Return the state of the process' default random streams: a ``rank_state`` to save.

    NumPy's is there when NumPy was imported, the device's when there is an accelerator.
    """
    version, numbers, spare = random.getstate()
    found: dict[str, Any] = {
        "python": [version, list(numbers), spare],
        "torch": _text(torch.get_rng_state()),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = [kind, keys.tolist(), *rest]
    if (device := _device_module()) is not None:
        found["device"] = _text(device.get_rng_state())
    return found


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the streams to where ``random_state`` recorded them.

    Raises ValueError, before any stream is changed, when it was something else that was saved.
    """
    try:
        version, numbers, spare = state["python"]
        torch_state = _tensor(state["torch"])
        device_state = _tensor(state["device"]) if "device" in state else None
        torch.Generator().set_state(torch_state)
        random.Random().setstate((version, tuple(numbers), spare))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"this is not what random_state() returns: {error!r}") from error
    random.setstate((version, tuple(numbers), spare))
    torch.set_rng_state(torch_state)
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(tuple(state["numpy"]))
    if device_state is not None and (device := _device_module()) is not None:
        device.set_rng_state(device_state)


def _device_module() -> Any:
    if not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    return None if current is None else torch.get_device_module(current)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
