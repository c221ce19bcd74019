"""Weight-gradient products handed to their accumulator, in fp32 and without a gradient.

A layer whose weight gradient is a product dy^T x looks for a taker of its weight. If there is one,
the layer gives it the two factors and returns no gradient: the product is added to an fp32 buffer
by one kernel, without a rounding to the weight's dtype.

Shapes: T tokens, O output and I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "Factors",
    "Taker",
    "accumulates",
    "add_product",
    "adds_in_fp32",
    "current_backward",
    "set_taker",
    "taker_of",
]

Factors = tuple[Tensor, Tensor]
"""dy (T, O) and x (T, I), of one dtype."""
Taker = Callable[[Sequence[Factors]], None]
"""Adds up the products of one backward pass: one contribution to the parameter's gradient."""

_TAKERS = WeakTensorKeyDictionary()
_ABLE: dict[torch.device, bool] = {}


def set_taker(parameter: nn.Parameter, taker: Taker | None) -> None:
    """Let ``taker`` have the products of a parameter's gradient; None: autograd has them.

    At most one layer may use the parameter, once in a backward pass. The parameter keeps
    ``taker`` alive: refer weakly to what has the parameter.
    """
    if taker is None:
        _TAKERS.pop(parameter, None)
    else:
        _TAKERS[parameter] = taker


def taker_of(parameter: nn.Parameter) -> Taker | None:
    """Return who has the products of a parameter's gradient.

    None, too, for a parameter with hooks besides that of its accumulator: they want a gradient.
    """
    taker = _TAKERS.get(parameter)
    if taker is None or parameter._backward_hooks:
        return None
    others = parameter._post_accumulate_grad_hooks
    return taker if others is None or len(others) <= 1 else None


def accumulates(node: Node) -> bool:
    """Return whether the backward that runs now accumulates what reaches a leaf by ``node``.

    ``torch.autograd.grad``, and ``backward`` with other ``inputs``, want nothing added.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad of the leaf itself: it wants the gradient returned
        return False


def current_backward() -> int:
    """Return the number of the backward pass that runs now, -1 outside of one."""
    return torch._C._current_graph_task_id()


def add_product(out: Tensor, a: Tensor, b: Tensor, *, replaces: bool = False) -> None:
    """Add ``a @ b``, (O, T) @ (T, I), to ``out`` (O, I), or overwrite it.

    ``out`` is fp32; the factors may be narrower.

    One kernel where ``adds_in_fp32``; elsewhere narrower factors are widened first.
    """
    beta = 0 if replaces else 1
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif adds_in_fp32(out.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    else:
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=beta, out=out)


def adds_in_fp32(device: torch.device) -> bool:
    """Return whether the device adds products of bfloat16 to fp32 in one kernel.

    Tried once on each device: torch has it for CUDA, some versions without an fp32 summand.
    """
    if device.type != "cuda":
        return False
    if device not in _ABLE:
        _ABLE[device] = _works(device)
    return _ABLE[device]


def _works(device: torch.device) -> bool:
    """Return whether 1 + 16 * 2^-16, in one kernel, is what it is in fp32."""
    out = torch.ones(16, 16, device=device)
    a = torch.full((16, 16), 2.0**-8, dtype=torch.bfloat16, device=device)
    try:
        torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return False
    return bool((out == 1 + 2.0**-12).all())
