"""What is known about a step besides its time: right values, bytes sent, peak memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from tp_contestants import WHOLE, Contestant

from kenotron_dist import Axis


def check(contestants: dict[str, Contestant], axis: Axis, autocast: bool, tolerance: float) -> None:
    """Compare outputs and gradients with the uncut module's: ``|a - b| <= tolerance |b|``.

    So that only equals are timed. Raises RuntimeError that names the contestant and the tensor.
    """
    whole = contestants[WHOLE]
    values = _values(whole, autocast)
    for name, contestant in contestants.items():
        if not contestant.checked:
            continue
        found = _values(contestant, autocast)
        expected = contestant.parts({k: v for k, v in values.items() if k not in ("x", "y")})
        for key in ("x", "y"):
            expected[key] = values[key]
            if contestant.sequence and values[key].ndim:
                expected[key] = values[key].chunk(axis.size)[axis.rank]
        for key, value in expected.items():
            error = float((found[key].double() - value.double()).norm() / value.double().norm())
            if not error <= tolerance:
                raise RuntimeError(f"{name}: {key} is off by {error:.1e} of its norm")


def _values(contestant: Contestant, autocast: bool) -> dict[str, Tensor]:
    """Output and gradients of one step, by name."""
    contestant.clear()
    with contestant.around():
        found = {"y": contestant.step(autocast)}
    tensors = {"x": contestant.x, **dict(contestant.module.named_parameters())}
    for name, tensor in tensors.items():
        if tensor.grad is None:
            raise RuntimeError(f"{name} has no gradient after the step")
        found[name] = tensor.grad
    contestant.clear()
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}


class Traffic(TorchDispatchMode):
    """Counts what this rank sends, at torch's dispatcher, which every contestant passes.

    Sends and exchanges count what they are given. Of a reduction or gather the backend decides how
    often data travels: the share is that of a ring (on gloo a reduce-scatter is an all-reduce).
    """

    def __init__(self, ranks: int, gloo: bool) -> None:
        super().__init__()
        part = (ranks - 1) / ranks
        shares = {
            "send": 1.0,
            "all_to_all": part,
            "all_reduce": 2 * part,
            "all_gather": ranks - 1.0,
            "reduce_scatter": 2 * part if gloo else part,
            "nothing": 0.0,
        }
        self.shares = {(space, name): shares[kind] for space, name, kind in _COLLECTIVES}
        self.sent, self.calls = 0.0, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count ``func`` if it communicates."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it becomes operations on plain tensors first
        if func.namespace in ("c10d", "_c10d_functional"):
            share = self.shares[func.namespace, func.__name__.split(".")[0]]
            given = args[1] if func.__name__.split(".")[0] in _OUTPUT_FIRST else args[0]
            tensors = [given] if isinstance(given, Tensor) else given
            self.sent += share * sum(t.numel() * t.element_size() for t in tensors)
            self.calls += share > 0
        return func(*args, **(kwargs or {}))


_COLLECTIVES = [
    ("c10d", "send", "send"),
    ("c10d", "recv_", "nothing"),
    ("c10d", "alltoall_base_", "all_to_all"),
    ("c10d", "allreduce_", "all_reduce"),
    ("c10d", "_allgather_base_", "all_gather"),
    ("c10d", "_reduce_scatter_base_", "reduce_scatter"),
    ("_c10d_functional", "all_to_all_single", "all_to_all"),
    ("_c10d_functional", "all_reduce", "all_reduce"),
    ("_c10d_functional", "all_reduce_", "all_reduce"),
    ("_c10d_functional", "all_gather_into_tensor", "all_gather"),
    ("_c10d_functional", "reduce_scatter_tensor", "reduce_scatter"),
    ("_c10d_functional", "wait_tensor", "nothing"),
    ("_c10d_functional", "_wrap_tensor_autograd", "nothing"),
]
"""Namespace, operation, and how its bytes count; any other one is a KeyError."""
_OUTPUT_FIRST = ("alltoall_base_", "_allgather_base_", "_reduce_scatter_base_")


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most that ``step`` holds at a time beyond what was there before, gradients included."""
    if device.type != "cpu":
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        step()
        return torch.accelerator.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
