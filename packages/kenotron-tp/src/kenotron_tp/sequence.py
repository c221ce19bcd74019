"""Sequence parallelism: between two cut layers each rank holds its own tokens (arXiv 2205.05198).

Tokens are cut along dim 0 in parts of n = T/t rows, rounded up; where the ranks do not divide T,
the last rows of the last ranks are padding. It starts as zeros, gets no gradient, and is dropped
when the tokens are gathered.

Shapes: T tokens, n of a rank, ``...`` features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis
from kenotron_dist.autograd import gather_from, scatter_to
from kenotron_dist.placement import Partial, Placements


def rows_of_rank(tokens: int, axis: Axis) -> int:
    """n: how many of ``tokens`` each rank holds, padding included."""
    return -(-tokens // axis.size)


def split_tokens(x: Tensor, axis: Axis) -> Tensor:
    """This rank's rows (n, ...) of x (T, ...), which is the same on every rank.

    For what enters the region between two layers. No communication; an all-gather in backward.
    """
    return scatter_to(pad_tokens(x, axis), axis, 0)


def join_tokens(x: Tensor, axis: Axis, tokens: int | None = None) -> Tensor:
    """All rows (T, ...) of every rank's x (n, ...), for a result that all ranks use the same way.

    ``tokens`` is T where the ranks do not divide it. One all-gather; none in backward. Raises
    ValueError when T does not fit n.
    """
    return gather_from(x, axis, 0)[: whole_tokens(x, axis, tokens)]


def mark_partial(module: nn.Module, axis: Axis) -> None:
    """Declare all parameters of ``module`` replicated with partial gradients: ``Partial(axis)``.

    For norms and other whole layers between two cut ones: each rank sees other tokens, so their
    gradients are to be summed (``kenotron_dist.sum_gradients``). Replaces their placements.
    """
    for each in module.modules():
        parameters = each.named_parameters(recurse=False)
        own: Placements = {name: Partial(axis.name) for name, _ in parameters}
        if own:
            setattr(each, "placements", own)  # noqa: B010 (a module's own attributes are typed)


def call_mode(layer: nn.Module, built: bool, wanted: bool | None) -> bool:
    """Return whether tokens are cut in this call of ``layer``: as it was built, or as ``wanted``.

    Raises ValueError when the mode is changed while gradients are recorded.
    """
    if wanted is None or wanted == built:
        return built
    if torch.is_grad_enabled() and any(p.requires_grad for p in layer.parameters()):
        raise ValueError(
            f"sequence_parallel={wanted} in forward, but the layer was built with {built}: its "
            "placements hold for that mode only, so change it under torch.no_grad() or "
            "torch.inference_mode()"
        )
    return wanted


def check_tokens(x: Tensor) -> None:
    """Raise ValueError when x is not (n, ..., features): tokens before its features."""
    if x.ndim < 2:
        raise ValueError(
            f"under sequence parallelism x {tuple(x.shape)} needs its tokens along dim 0 and its "
            "features along the last"
        )


def whole_tokens(x: Tensor, axis: Axis, tokens: int | None) -> int:
    """T, from what the caller says and the rows x (n, ...) of one rank."""
    rows = x.shape[0]
    if tokens is None:
        return rows * axis.size
    if rows_of_rank(tokens, axis) != rows:
        raise ValueError(
            f"{tokens} tokens over {axis.size} {axis.name} ranks are "
            f"{rows_of_rank(tokens, axis)} rows a rank, but this one has {rows}: `tokens` is the "
            "number of all ranks' tokens together"
        )
    return tokens


def pad_tokens(x: Tensor, axis: Axis) -> Tensor:
    """x (T, ...) with rows of zeros up to n on every rank: (t n, ...)."""
    return pad_rows(x, rows_of_rank(x.shape[0], axis) * axis.size)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x (m, ...) with rows of zeros up to ``rows`` of them."""
    missing = rows - x.shape[0]
    return x if missing == 0 else F.pad(x, [0, 0] * (x.ndim - 1) + [0, missing])
