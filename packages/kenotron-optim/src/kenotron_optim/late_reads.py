"""Modules whose parameters are read after their forward, such as a head whose loss multiplies."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def is_read_later(
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    outputs: list[Tensor],
    storages: Container[int],
) -> bool:
    """Return True where a module leaves the use of its parameters to a later reader.

    Its output is what it was given or a parameter, nothing was computed from a parameter of its
    own (it scales or casts its input), or its method ``leaves_weight_to_loss`` returns True. The
    method takes what the forward takes; it is asked where there is no graph, too.

    Args:
        module: the module.
        args: its inputs.
        kwargs: its inputs by name.
        outputs: tensors of its output, of any shape.
        storages: those of all parameters.
    """
    given = tree_leaves((args, kwargs))
    if any(x is y for x in outputs for y in given):
        return True
    if any(x.untyped_storage()._cdata in storages for x in outputs):
        return True
    leaves: Callable[..., bool] | None = getattr(module, "leaves_weight_to_loss", None)
    if leaves is not None and leaves(*args, **kwargs):
        return True
    own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    inputs = [x for x in given if isinstance(x, Tensor)]
    learned = [x for x in outputs if x.requires_grad]
    return bool(own and learned) and not _is_computed_from(own, learned, inputs)


def _is_computed_from(own: Container[int], outputs: list[Tensor], inputs: list[Tensor]) -> bool:
    """Search autograd's graph from ``outputs`` to ``inputs`` for leaves with one of these ids."""
    seen = {x.grad_fn for x in inputs if x.grad_fn is not None}
    nodes = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        if id(getattr(node, "variable", None)) in own:
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions if following is not None]
    return False
