"""Autograd's engine, called as ``torch.autograd`` calls it after its checks.

What enters was checked when it was negotiated or comes from the graph itself, and for a small
layer those checks take as long as its backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

_run = Variable._execution_engine.run_backward


def accumulate(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], leaves: Sequence[Tensor] = ()
) -> None:
    """Add the gradients of all leaves below ``roots``, or of those given, to their ``grad``.

    ``gradients`` have the shapes of ``roots``.
    """
    _run(
        tuple(roots), tuple(gradients), False, False, tuple(leaves),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def gradients_at(
    places: Sequence[GradientEdge],
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    *,
    keep_graph: bool,
) -> list[Tensor | None]:
    """Return the gradients that arrive at ``places``; None where none does. No ``grad`` changes.

    ``gradients`` have the shapes of ``roots``, and results those of ``places``.
    """
    found = _run(
        tuple(roots), tuple(gradients), keep_graph, False, tuple(places),
        allow_unreachable=True, accumulate_grad=False,
    )  # fmt: skip
    return list(found)
