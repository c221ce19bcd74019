"""Sequence parallelism for layers of transformers: norms and residuals of 1/t of the tokens.

Between layers each rank of tp holds n of the T tokens. A layer's own ``forward`` computes its norms
and residuals with them as one row (1, n, D). Its attention, feed-forward network and mixers get all
tokens and hand back this rank's.

Shapes: B rows, S tokens of a row, T = B * S, n = T/t rounded up, D hidden.
"""

from __future__ import annotations

import re
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Axis
from kenotron_dist.autograd import all_gather_from, reduce_scatter_to
from kenotron_dist.placement import Partial, Placements, Shard, named_placements
from kenotron_models.transformers_attention import context_now
from kenotron_tp import (
    ColumnParallelLinear,
    RowParallelLinear,
    join_tokens,
    mark_partial,
    split_tokens,
)

MIXES = re.compile(r"attn|attention|mlp|feed_?forward|ff[n]?|mamba|mixer|conv|moe|block_sparse")
"""Names of modules of a layer that get all tokens."""


class AllTokens(nn.Module):
    """Stands in front of a module's class: it gets all tokens, and returns this rank's.

    Where each rank computes a summand (``sums``), the sum is scattered: an all-gather and a
    reduce-scatter, forward and backward. Else the module communicates for itself, and its result
    is cut: an all-gather in forward and one in backward. Collective over tp.
    """

    gathers_over: Axis
    sums: bool

    def forward(self, *args: Any, **options: Any) -> Any:
        """Compute with hidden features (B, S, D) instead of (1, n, D)."""
        name = None if args else "hidden_states"
        x = args[0] if name is None else options[name]
        others = [*args[1:], *(each for key, each in options.items() if key != name)]
        if any(isinstance(each, Tensor) and each.shape == x.shape for each in others):
            raise ValueError(
                f"a {type(self).__mro__[2].__name__} is called with two tensors of hidden "
                "features, of which one is not gathered"
            )
        whole = self.enter(x)
        args, options = (
            ((whole, *args[1:]), options) if name is None else (args, {**options, name: whole})
        )
        y = super().forward(*args, **options)
        if isinstance(y, tuple):
            return (self.leave(y[0]), *y[1:])
        return self.leave(y)

    def enter(self, x: Tensor) -> Tensor:
        """Gather this rank's tokens (1, n, D) and return all of them, (B, S, D)."""
        context, axis = context_now(), self.gathers_over
        assert context is not None
        rows, tokens = x.flatten(0, -2), context.tokens
        whole = (
            all_gather_from(rows, axis)[:tokens] if self.sums else join_tokens(rows, axis, tokens)
        )
        return whole.view(*context.positions_BS.shape, -1)

    def leave(self, y: Tensor) -> Tensor:
        """Return this rank's tokens (1, n, D) of a result (B, S, D)."""
        rows, axis = y.flatten(0, -2), self.gathers_over
        if self.sums:
            padded = F.pad(rows, (0, 0, 0, -len(rows) % axis.size))
            return reduce_scatter_to(padded, axis)[None]
        return split_tokens(rows, axis)[None]


def cut_tokens(path: str, layer: nn.Module, axis: Axis) -> None:
    """Let a layer compute its norms and residuals with this rank's tokens, in place.

    Args:
        path: its name, for errors.
        layer: of transformers, cut over tp.
        axis: tp.

    Raises:
        ValueError: something between its norms and residuals needs more than one token, or has
            features that are cut.
    """
    for name, child in layer.named_children():
        if not [*child.parameters()]:
            continue
        kind = type(child).__name__
        if isinstance(child, ColumnParallelLinear | RowParallelLinear):
            raise ValueError(
                f"{path}.{name} is cut over tp and has no module of its own: tokens between norms "
                "and residuals stay whole"
            )
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"{path}.{name} is a {kind}, whose modules the layer calls by itself")
        if "norm" in kind.lower() and not named_placements(child):
            mark_partial(child, axis)
        elif MIXES.search(name):
            _gather(child, axis)
        else:
            raise ValueError(
                f"{path}.{name} is a {kind}: it is not known that it computes each token by itself"
            )
    own: Placements = {
        name: Partial(axis.name) for name, _ in layer.named_parameters(recurse=False)
    }
    if own:
        placements = {**getattr(layer, "placements", {}), **own}
        setattr(layer, "placements", placements)  # noqa: B010 (a module's attributes are typed)


def _gather(module: nn.Module, axis: Axis) -> None:
    """Put ``AllTokens`` in front of a module's class."""
    own, sums = type(module), _gives_summand(module, axis)
    if sums:
        for each in module.modules():
            if isinstance(each, ColumnParallelLinear | RowParallelLinear):
                each.axis = Axis.solo(axis.name)  # the module's own collectives replace theirs
                each.summed_over = axis  # type: ignore[assignment]
    module.__class__ = type(f"AllTokens{own.__name__}", (AllTokens, own), {})
    module.gathers_over, module.sums = axis, sums  # type: ignore[assignment]


def _gives_summand(module: nn.Module, axis: Axis) -> bool:
    """Return True where column layers lead to one row layer, and each rank has a part of all."""
    cut = ColumnParallelLinear, RowParallelLinear
    layers = [each for each in module.modules() if isinstance(each, cut)]
    if any(type(each) not in cut for each in layers):
        return False  # one that communicates in another way
    if sum(isinstance(each, RowParallelLinear) for each in layers) != 1:
        return False
    placed = named_placements(module)
    return all(  # what is whole, such as a bias of the row layer, would be added by every rank
        any(isinstance(p, Shard | Partial) and p.axis == axis.name for p in placed.get(name, ()))
        for name, _ in module.named_parameters()
    )
