"""Values for what a program reads of a device without values: experts get equally many rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Around = Mapping[str, Any]
"""Variables of the function that reads."""


def evenly(total: int, parts: int) -> list[int]:
    each, more = divmod(total, parts)
    return [each + (i < more) for i in range(parts)]


def rows_of_groups(counts: Tensor, around: Around) -> Tensor:
    """Rows of each group of rows."""
    rows = around["y"] if "y" in around else around["x"]
    return torch.tensor(evenly(len(rows), counts.numel())).view(counts.shape)


def exchanged(counts: Tensor, around: Around) -> Tensor:
    """Rows to and from each rank (2, n, c, e + 1) of c parts, and their tokens at the end."""
    parts, axis, experts = around["choices"], around["axis"], counts.shape[3] - 1
    loads = [evenly(part.tokens * part.top_k, axis.size * experts) for part in parts]
    rows = torch.tensor(loads).view(len(parts), axis.size, experts).transpose(0, 1)
    tokens = torch.tensor([part.tokens for part in parts]).expand(axis.size, -1)[..., None]
    ours = torch.cat([rows, tokens], 2)
    return torch.stack([ours, ours[axis.rank].expand_as(ours)])


def distinct(counts: Tensor, around: Around) -> Tensor:
    """Distinct tokens of each group: the most that can be."""
    each = min(len(around["places"]) // around["groups"] + 1, around["width"])
    return torch.full(counts.shape, each)


def nothing_wrong(x: Tensor, around: Around) -> Tensor:
    """A check that finds nothing."""
    return torch.zeros(x.shape, dtype=x.dtype)


ANSWERS: dict[str, Callable[[Tensor, Around], Tensor]] = {
    "ep/src/kenotron_ep/exchange.py": exchanged,
    "ep/src/kenotron_ep/shared_tokens.py": distinct,
    "models/src/kenotron_models/stacked_by_source.py": rows_of_groups,
    "models/src/kenotron_models/stacked_linear.py": rows_of_groups,
    "models/src/kenotron_models/transformers_model.py": nothing_wrong,
    "tp/src/kenotron_tp/logits.py": nothing_wrong,
}
"""By file; elsewhere each number is 1."""
