"""State of torch's optimizers before their first update, in which torch creates it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from kenotron_optim.torch_groups import batches

Advance = Callable[[torch.optim.Optimizer], None]
Held = Callable[[Sequence[Tensor]], AbstractContextManager[None]]
"""Within the context masters and their state have memory (``kenotron_optim.offload``)."""


def create_state(
    optimizers: Sequence[torch.optim.Optimizer],
    masters: Sequence[Tensor],
    advance: Advance,
    held: Held,
) -> None:
    """Let torch create all state by updates that are undone; then it is all zero.

    Next to the state it takes memory for twice the largest master.

    Args:
        optimizers: over the masters.
        masters: fp32 leaves of any shape.
        advance: updates the masters of an optimizer's groups.
        held: gives masters memory.
    """
    limit = max((master.nbytes for master in masters), default=0)
    for optimizer in optimizers:
        groups = optimizer.param_groups
        try:
            for group in groups:
                for batch in batches(group["params"], limit):
                    optimizer.param_groups = [{**group, "params": batch, "lr": 0.0}]
                    with held(batch):
                        _create(optimizer, batch, advance)
        finally:
            optimizer.param_groups = groups


def _create(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor], advance: Advance) -> None:
    before = [master.detach().clone() for master in masters]
    for master in masters:
        master.grad = torch.zeros_like(master)
    advance(optimizer)
    for master, value in zip(masters, before, strict=True):
        master.data.copy_(value)
        master.grad = None
        for entry in optimizer.state[master].values() if master in optimizer.state else ():
            if isinstance(entry, Tensor):
                entry.zero_()
