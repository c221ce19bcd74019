"""A layer of transformers as programs of ``torch.compile``, without what communicates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kenotron_dist import Axis
from kenotron_models.transformers_experts import ExchangedExperts, is_experts
from kenotron_models.transformers_model import attend_outside_programs
from kenotron_models.transformers_sequence import AllTokens


def compiled_block(block: nn.Module) -> nn.Module:
    """Return a layer that calls programs; its modules and the names of parameters stay.

    Layers that communicate are called by the programs, and experts, whose tokens are others at each
    step, and attention that is computed here.
    """
    attend_outside_programs()
    for path, part in block.named_modules():
        axis = getattr(part, "axis", None)
        if isinstance(part, AllTokens):
            for name in ("enter", "leave"):  # what is between them is compiled
                setattr(part, name, torch.compiler.disable(getattr(part, name)))
        sends = isinstance(part, ExchangedExperts) or (isinstance(axis, Axis) and axis.size > 1)
        if sends or is_experts(path, part):
            part.forward = torch.compiler.disable(part.forward)
    compiled: Any = torch.compile(block, dynamic=False)
    return compiled
