"""Counts the kernels of an accelerator, and the bytes that they move, on the meta device.

Meta tensors have shapes and no values, so a model of any size is counted in a second without a GPU.
What CUDA computes with one kernel and the meta device with many is replaced: RMSNorm, attention,
and a softmax that casts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view",
    "detach", "alias", "lift_fresh", "_reshape_alias", "view",
}  # fmt: skip
OVERWRITES = {"copy_", "zero_", "fill_"}
"""Operations in place that do not read what they write to."""
MAKES = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
"""Operations that read only the shape of their argument."""
SPARSE = {"gather", "scatter_add_", "index_select", "index", "embedding", "scatter_", "index_put_"}
"""Operations that touch as many elements of the large tensor as there are in the small ones."""


class Cost(NamedTuple):
    """What a phase of a step takes."""

    kernels: int
    nbytes: int
    """Read and written."""


class KernelCounter(TorchDispatchMode):
    """Counts kernels and bytes of the operations inside a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        """Kernels by the name of the operation."""
        self.nbytes: Counter[str] = Counter()
        """Bytes by the name of the operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in NO_KERNEL and _does_something(args, kwargs, out):
            self.names[name] += 1
            self.nbytes[name] += _moved(func._schema, name, args, kwargs, out)
        return out

    @property
    def cost(self) -> Cost:
        """All that was counted."""
        return Cost(self.names.total(), self.nbytes.total())


@contextmanager
def counting() -> Iterator[KernelCounter]:
    """Count what happens inside, with fused kernels and addresses as on CUDA."""
    counter = KernelCounter()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "data_ptr", _address))
        # torch has no autocast on meta, and raises when it is asked for
        stack.enter_context(mock.patch("torch.is_autocast_enabled", lambda *_: False))
        stack.enter_context(_FusedAsOnCuda())
        stack.enter_context(counter)
        yield counter


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _does_something(args: Any, kwargs: Any, out: Any) -> bool:
    return any(x.numel() for x in _tensors(args, kwargs, out))


def _size(x: Tensor) -> int:
    """Bytes that are there: what is expanded is read once."""
    shape = zip(x.shape, x.stride(), strict=True)
    count = 1
    for size, stride in shape:
        count *= size if stride else min(size, 1)
    return count * x.element_size()


def _moved(schema: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes that an operation reads and writes."""
    if name in MAKES:
        return sum(map(_size, _tensors(out)))
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    given |= kwargs
    total, large = 0, 0
    changed: set[int] = set()
    for argument in schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for x in _tensors(given.get(argument.name)):
            times = 1 + writes if not writes or not _overwritten(argument, name) else 1
            total += times * _size(x)
            large = max(large, times * _size(x))
            if writes:
                changed.add(id(x))
    total += sum(_size(x) for x in _tensors(out) if id(x) not in changed)
    if name not in SPARSE:
        return total
    rest = total - large
    return rest + rest // 2  # the elements that the indices point to


def _overwritten(argument: Any, name: str) -> bool:
    return name in OVERWRITES or (argument.kwarg_only and argument.is_out)


def _address(x: Tensor) -> int:
    """An address for a tensor that has none: equal for views of the same place."""
    return x.untyped_storage()._cdata * 2**20 + x.storage_offset() * x.element_size()


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        y, scale = torch.ops.kenotron_counted.rms_norm(x, weight)
        ctx.save_for_backward(x, scale, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:  # pyrefly: ignore[bad-override]
        x, scale, weight = ctx.saved_tensors
        dx, dw = torch.ops.kenotron_counted.rms_norm_backward(grads[0], x, scale, weight)
        return dx, None if weight is None else dw


class _FusedAsOnCuda(TorchFunctionMode):
    """Calls one kernel where torch on CUDA calls one, and on meta several."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.rms_norm, torch.rms_norm):
            return self._norm(*args, **kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("attn_mask") is None:
            return self._attention(*args, **kwargs)
        if func is torch.softmax and kwargs.get("dtype", args[0].dtype) != args[0].dtype:
            return torch._softmax(args[0], args[1], True)  # the cast is in the kernel
        return func(*args, **kwargs)

    def _norm(
        self, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is not None and weight.dtype != x.dtype:
            return torch.rms_norm(x, shape, weight, eps)
        return _FusedNorm.apply(x, weight)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, **_: Any
    ) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, 0.0, is_causal, scale=scale)[0]


_LIBRARY = torch.library.Library("kenotron_counted", "DEF")
_LIBRARY.define("rms_norm(Tensor x, Tensor? weight) -> (Tensor, Tensor)")
_LIBRARY.define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor scale, Tensor? weight) -> (Tensor, Tensor)"
)


def _norm_on_meta(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


def _norm_backward_on_meta(
    dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0 if weight is None else len(weight))


_LIBRARY.impl("rms_norm", _norm_on_meta, "Meta")
_LIBRARY.impl("rms_norm_backward", _norm_backward_on_meta, "Meta")
