"""Parameter groups of torch's optimizers, over masters of slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kenotron_optim.groups import ParameterGroup

NOT_ELEMENTWISE = frozenset({"Adafactor", "LBFGS", "Muon"})
"""Rules of torch whose update of an element depends on the rest of its tensor."""
Piece = tuple[str, int]
"""(logical name, data rank whose slice it is)"""
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizers]
"""Parameter groups -> ``torch.optim`` optimizers that share them out: elementwise ones."""


def check_names(groups: Sequence[ParameterGroup], names: Collection[str]) -> None:
    """Raise ValueError for a name that the model has not, or that is in two groups."""
    given = [name for group in groups for name in group.names]
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"groups name parameters {unknown} that the model has not")
    twice = sorted(name for name, times in Counter(given).items() if times > 1)
    if twice:
        raise ValueError(f"parameters {twice} are in two groups: a parameter has one")


def options_of(
    groups: Sequence[ParameterGroup],
    masters: Mapping[Piece, Tensor],
    matrices: Container[str] | None,
) -> list[dict[str, Any]]:
    """torch parameter groups over the flat masters, each piece in the group of its name."""
    pieces: dict[str, list[Tensor]] = {}
    for (name, _), master in masters.items():
        pieces.setdefault(name, []).append(master)
    options = []
    for group in groups:
        kinds = {name: matrices is not None and name in matrices for name in group.names}
        for is_matrix in sorted(set(kinds.values())):
            names = [name for name, kind in kinds.items() if kind is is_matrix]
            own = [master for name in names for master in pieces.pop(name, [])]
            if own:
                options.append(
                    {
                        "params": own,
                        "weight_decay": group.weight_decay,
                        "lr_multiplier": group.lr_multiplier,  # torch keeps keys of others
                        "matrices": is_matrix,
                    }
                )
    if pieces:
        raise ValueError(f"parameters {sorted(pieces)} are in no group: every one needs options")
    return options


def made_of(
    make_optimizer: MakeOptimizer, options: list[dict[str, Any]]
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of some groups; none for a rank that owns nothing.

    Raises ValueError for what makes no optimizers of groups, or makes one that is not elementwise.
    """
    if not callable(make_optimizer):
        kind = type(make_optimizer).__name__
        raise ValueError(
            f"make_optimizer is a {kind}: give what makes one of parameter groups over slices, "
            "such as lambda groups: torch.optim.AdamW(groups), or take ZeroOptimizer(module, mesh)"
        )
    made = make_optimizer(options) if options else []
    found = [made] if isinstance(made, torch.optim.Optimizer) else list(made)
    check_elementwise(found)
    return found


def check_elementwise(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise ValueError for one whose numbers on slices would depend on the number of ranks."""
    for optimizer in optimizers:
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        if found := sorted(kinds & NOT_ELEMENTWISE):
            raise ValueError(
                f"{type(optimizer).__name__} ({found[0]}) looks at whole tensors, and gets slices "
                "of them here: take an elementwise one (AdamW, Adam, SGD, Adagrad, RMSprop), or "
                "update_rule(MuonConfig(), layouts)"
            )


def batches(masters: Sequence[Tensor], limit: int) -> Iterable[list[Tensor]]:
    """Split flat masters into runs of at most ``limit`` bytes."""
    batch: list[Tensor] = []
    filled = 0
    for master in masters:
        if batch and filled + master.nbytes > limit:
            yield batch
            batch, filled = [], 0
        batch.append(master)
        filled += master.nbytes
    if batch:
        yield batch


def state_of(
    optimizers: Iterable[torch.optim.Optimizer], master: Tensor
) -> list[tuple[str, Tensor]]:
    """Return a flat master's state of its shape, by kind: moments, not a count of steps."""
    state = next((each.state[master] for each in optimizers if master in each.state), {})
    return [
        (kind, entry)
        for kind, entry in state.items()
        if isinstance(entry, Tensor) and entry.shape == master.shape and kind != "step"
    ]
