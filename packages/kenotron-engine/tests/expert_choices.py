"""Which experts each token of a batch chose, to compare layouts with one process.

T tokens of a rank, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from kenotron_data import Batch
from kenotron_dist.boxes import scatter
from kenotron_engine import Training, Whole, evaluate
from kenotron_models import Context
from kenotron_models.layers import Choice, Experts, Router

Token = tuple[int, int, int]
"""Layer, number of the sample, position."""


class Chosen(NamedTuple):
    """What a router decided for a token."""

    experts: tuple[int, ...]
    """K experts in order of their numbers."""
    margin: float
    """Score of the last expert that was chosen, less that of the first that was not."""


def routers_of(training: Training) -> list[Router]:
    """The routers of this rank's stage."""
    modules = training.model.stack.modules()
    return [each.router for each in modules if isinstance(each, Experts)]


def choices_of(training: Training, batches: list[Batch]) -> list[tuple[Token, Chosen]]:
    """Return what this rank's routers decide for the tokens of some batches.

    Collective over the mesh.
    """
    found: list[tuple[Token, Chosen]] = []
    modules = training.model.stack.modules()
    watched = [_Watch(each, found) for each in modules if isinstance(each, Experts)]
    evaluate(training, batches, ("all",))
    for watch in watched:
        watch.end()
    return found


class _Watch:
    """Hooks of a layer that add its choices to a list."""

    def __init__(self, experts: Experts, found: list[tuple[Token, Chosen]]) -> None:
        self.experts, self.found = experts, found
        self.handles = [
            experts.register_forward_pre_hook(self.before),
            experts.router.register_forward_hook(self.after),
        ]

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.context: Context = args[1]

    def after(self, router: nn.Module, args: tuple[Any, ...], choice: Choice) -> None:
        self.found.extend(_tokens(self.experts, self.context, choice))

    def end(self) -> None:
        for handle in self.handles:
            handle.remove()


def _tokens(experts: Experts, context: Context, choice: Choice) -> list[tuple[Token, Chosen]]:
    """The tokens of a micro-batch that this rank routes; those of tp are cut in order of ranks."""
    bias, top_k = experts.router.choice_bias, experts.spec.router.top_k
    scores_TE = choice.scores_TE if bias is None else choice.scores_TE + bias
    best = scores_TE.sort(dim=-1, descending=True).values
    margins = (best[:, top_k - 1] - best[:, top_k]).tolist()
    chosen = choice.experts_TK.sort(dim=-1).values.tolist()
    positions, samples = context.positions_BS, context.samples_B
    assert samples is not None
    sample_of = samples[:, None].expand_as(positions).flatten().tolist()
    hidden = torch.zeros_like(positions) if context.padding_BS is None else context.padding_BS
    place, padding, first = positions.flatten().tolist(), hidden.flatten().tolist(), 0
    if experts.tp.size > 1:
        first = experts.tp.rank * len(chosen)
    return [
        ((experts.layer, sample_of[first + i], place[first + i]), Chosen(tuple(each), margin))
        for i, (each, margin) in enumerate(zip(chosen, margins, strict=True))
        if first + i < len(place) and not padding[first + i]
    ]


def set_weights(training: Training, whole: Whole) -> None:
    """Overwrite this rank's parameters with their parts of whole tensors."""
    layouts = training.model.layouts
    for path, parameter in training.parameters().items():
        layout = layouts[path]
        values = scatter(torch.from_numpy(whole[layout.name]), layout, training.mesh.view(layout))
        with torch.no_grad():
            parameter.copy_(values)


def flips(
    ranks: Iterable[list[tuple[Token, Chosen]]], one: list[tuple[Token, Chosen]]
) -> dict[Token, float]:
    """Return the margin, on one process, of each token that ranks send to other experts.

    What a flip changes in later layers is left out: those of its token and of tokens after it.

    Raises ValueError unless each token was routed by one rank.
    """
    routed = [each for rank in ranks for each in rank]
    ours, theirs = dict(routed), dict(one)
    if len(ours) != len(routed) or ours.keys() != theirs.keys():
        raise ValueError(f"{len(routed)} tokens were routed, and {len(one)} by one process")
    found: dict[Token, float] = {}
    for token in sorted(theirs):  # by layer
        if theirs[token].experts != ours[token].experts and not _follows(token, found):
            found[token] = theirs[token].margin
    return found


def _follows(token: Token, flipped: Iterable[Token]) -> bool:
    """Whether a token has seen one that was flipped in an earlier layer."""
    layer, sample, position = token
    return any(
        before < layer and other == sample and place <= position for before, other, place in flipped
    )
