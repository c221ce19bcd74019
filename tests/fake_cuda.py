"""A CUDA device that only exists in name: real tensors on the host, shapes alone on the device.

Within ``fake_cuda()`` what a program puts on ``cuda:0`` has a shape, a dtype and that device, and
no values, as torch's fake tensors; tensors on the CPU are ordinary. So a program takes its GPU
paths, and three faults of these raise an error with the operator, each at its line: an operation on
tensors of both devices, a number of the device read on the host, and a copy from memory that is not
page-locked, for which the host waits. Reads that are known (``host_reads``) get an answer.

torch's own fake tensors cannot do this where no GPU is: torch's autograd asks the driver for the
streams of any tensor that is on CUDA to C++. To C++ these here are on meta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from fake_cuda_device import (
    CPU,
    DEVICE,
    META,
    DeviceFault,
    DeviceTensor,
    Machine,
    WrongDevice,
    answered,
    blocking,
    caller,
    inside_operator,
    on_device,
    ones,
    shape_of,
    wrapped,
)
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from kenotron_dist.diagnosis import MetaResults

HOPPER = (9, 0)
"""Compute capability."""
aten = torch.ops.aten
READING = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default,
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default,
}  # fmt: skip
"""Operators whose results, or their shapes, are numbers of the device."""
COPIES = {aten.copy_.default, aten._foreach_copy_.default}
INDEXES = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._index_put_impl_.default,
}  # fmt: skip
"""Operators with indices: those on the host are copied to the device, for which the host waits."""


class Calls(TorchFunctionMode):
    """Replaces the device in calls of torch's functions, before torch would look for a driver."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if DeviceTensor.inside or func is torch.device:
            return func(*args, **given)
        name, machine = getattr(func, "__name__", ""), self.machine
        if name in ("tolist", "numpy", "__array__") and isinstance(args[0], DeviceTensor):
            found = self._read(name, args[0])
            return found.numpy() if name != "tolist" else found.tolist()
        if name in ("pin_memory", "is_pinned") and args[0].device == CPU:
            return self._pinned(name, args[0])
        pin = given.pop("pin_memory", False) if name != "tensor" else False
        wanted = self._wanted(name, args, given)
        if wanted == DEVICE:
            if name == "cuda":
                func, args = Tensor.to, (args[0], META, *args[1:])
            args = tuple(META if _is_device(name, i, x) else x for i, x in enumerate(args))
            if given.get("device") is not None:
                given["device"] = META
        machine.wanted.append(wanted)
        try:
            if wanted == DEVICE and name in ("tensor", "as_tensor"):
                blocking(machine, "torch.tensor(..., device=...)")
            found = func(*args, **given)
        finally:
            machine.wanted.pop()
        return self._pinned("pin_memory", found) if pin else found

    def _read(self, name: str, x: Tensor) -> Tensor:
        return answered(self.machine, name, x)

    def _pinned(self, name: str, x: Tensor) -> Any:
        place = x.untyped_storage().data_ptr()
        if name == "is_pinned":
            return place in self.machine.pinned
        copied = x.clone(memory_format=torch.contiguous_format)
        self.machine.pinned.add(copied.untyped_storage().data_ptr())
        return copied

    def _wanted(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """Device of the results: what was asked for, else that of the arguments."""
        if name == "cuda":
            return DEVICE
        asked = given.get("device")
        if asked is None:
            asked = next((x for i, x in enumerate(args) if _is_device(name, i, x)), None)
        if asked is not None:
            asked = DEVICE if isinstance(asked, int) else torch.device(asked)
            return DEVICE if asked.type == "cuda" else asked
        flat = tree_flatten((args, given))[0]
        if any(isinstance(x, DeviceTensor) for x in flat):
            return DEVICE
        return next((x.device for x in flat if isinstance(x, Tensor)), CPU)


def _is_device(name: str, i: int, x: Any) -> bool:
    """Return True for an argument that names a device."""
    if isinstance(x, torch.device):
        return True
    return name == "to" and i == 1 and isinstance(x, str)


class Operators(TorchDispatchMode):
    """Runs operators on the CPU as they are; of those on the device it computes the shapes."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self.results = machine, MetaResults()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, given))[0] if isinstance(x, Tensor)]
        there = any(isinstance(x, DeviceTensor) for x in tensors)
        host = [x for x in tensors if x.device == CPU]
        wanted = self.machine.wanted[-1] if self.machine.wanted else DEVICE
        made = given.get("device") == META and wanted != META
        if not there and not made:
            return func(*args, **given)
        if there and (func in READING or _takes_mask(func, tensors)):
            return self._read(func, args)
        if there and given.get("device") == CPU:
            return answered(self.machine, "cpu", args[0]).to(given.get("dtype"))
        if func in COPIES:
            if self._copied(func, *args, **given):
                return args[0]
        elif func is aten._to_copy.default and host:
            self._upload(host[0], given.get("non_blocking", False))
        elif there and host:
            _check_devices(self.machine, func, tensors, host)
        if func is aten._fused_sdp_choice.default:
            return _kernel(*args, **given)
        if func is aten.repeat_interleave.Tensor and given.get("output_size") is None:
            return self._read(func, args)
        self.machine.operators[str(func)] += 1
        with inside_operator():
            args, given = tree_map_only(Tensor, shape_of, (args, given))
            found = self.results.__torch_dispatch__(func, types, args, given)
        old = {id(x) for x in tree_flatten((args, given))[0]}
        return tree_map_only(Tensor, lambda x: x if id(x) in old else wrapped(x), found)

    def _read(self, func: Any, args: Sequence[Any]) -> Any:
        found = answered(self.machine, str(func), args[0])
        if func is aten._local_scalar_dense.default:
            return found.reshape(-1)[0].item()
        result = func(found, *tree_map_only(DeviceTensor, ones, args[1:]))
        return tree_map_only(Tensor, lambda x: on_device(x.to(META)), result)

    def _copied(self, func: Any, to: Any, source: Any, non_blocking: bool = False) -> bool:
        """Return True for a copy to the host, which is done then."""
        pairs = [(to, source)] if isinstance(to, Tensor) else list(zip(to, source, strict=True))
        down = [p for p in pairs if p[0].device == CPU and isinstance(p[1], DeviceTensor)]
        up = [p for p in pairs if p[1].device == CPU and isinstance(p[0], DeviceTensor)]
        for target, x in down:
            queued = non_blocking and target.untyped_storage().data_ptr() in self.machine.pinned
            target.fill_(1) if queued else target.copy_(answered(self.machine, str(func), x))
        for _, x in up:
            self._upload(x, non_blocking)
        return bool(down)

    def _upload(self, x: Tensor, non_blocking: bool) -> None:
        if not non_blocking or x.untyped_storage().data_ptr() not in self.machine.pinned:
            blocking(self.machine, "a copy to the device")


def _check_devices(
    machine: Machine, func: Any, tensors: Sequence[Tensor], host: Sequence[Tensor]
) -> None:
    """Raise WrongDevice where CUDA would not take tensors of the host, too."""
    if func in INDEXES and isinstance(tensors[0], DeviceTensor):
        blocking(machine, "indices on the host")
        return
    numbers = all(x.ndim == 0 for x in host) and torch.Tag.pointwise in func.tags
    if not numbers:
        shapes = ", ".join(str(tuple(x.shape)) for x in host)
        raise WrongDevice(f"{func} at {caller()[1]}: tensors on cuda:0, and on the CPU {shapes}")


def _takes_mask(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Return True where a mask is an index: how much it takes is a number of the device."""
    return func in INDEXES and any(x.dtype == torch.bool for x in tensors[1:])


def _kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> int:
    """Kernel of torch's attention that a Hopper GPU takes."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return SDPBackend.MATH.value
    half = q.dtype != torch.float32 and mask is None
    kernel = SDPBackend.FLASH_ATTENTION if half else SDPBackend.EFFICIENT_ATTENTION
    return kernel.value


class _Stream:
    """A queue of a device that does nothing: all that is queued is done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def nothing(self, *_: Any) -> None: ...

    record = wait = wait_event = wait_stream = synchronize = nothing


def _accelerator() -> dict[Any, dict[str, Any]]:
    """Replacements of what asks the driver."""

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    here = {
        "is_available": always(True), "current_accelerator": always(torch.device("cuda")),
        "device_count": always(1), "current_device_index": always(0),
        "set_device_index": always(None), "current_stream": _Stream, "synchronize": always(None),
    }  # fmt: skip
    cuda = {"get_device_capability": always(HOPPER), "current_device": always(0),
            "get_device_name": always("a GPU in name only")}  # fmt: skip
    return {torch.accelerator: here, torch.cuda: cuda, torch: {"Event": _Stream}}


def _run_backward(calls: Calls, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let ``calls`` see what hooks call: a mode is off while one of its functions runs."""
    if torch._C._len_torch_function_stack():
        return run(*args, **kwargs)
    with calls:
        return run(*args, **kwargs)


@contextmanager
def a_step(machine: Machine) -> Iterator[None]:
    """Allow within it no more than a step may do. A fault in a pipeline is raised as itself."""
    machine.in_step = True
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, DeviceFault):
            raise error.__cause__ from error
        raise
    finally:
        machine.in_step = False


@contextmanager
def fake_cuda() -> Iterator[Machine]:
    """Pretend that this process has one GPU; see the module.

    Raises:
        WrongDevice, HostRead, BlockingCopy: within, at the operation.
    """
    machine = Machine()
    with ExitStack() as stack:
        for module, names in _accelerator().items():
            stack.enter_context(mock.patch.multiple(module, **names))
        run = partial(_run_backward, Calls(machine), torch.autograd._engine_run_backward)
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", run))
        stack.enter_context(Calls(machine))
        stack.enter_context(Operators(machine))
        yield machine
