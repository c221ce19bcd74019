"""The gate of a shared expert. Shapes: T tokens, D hidden."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kenotron_dist import Roles
from kenotron_dist.placement import Partial, Placements
from kenotron_models.build import Build
from kenotron_tp import matmul


class SharedGate(nn.Module):
    """A sigmoid of each token, (T, D) -> (T, 1); ``weight`` (1, D) is replicated over tp."""

    def __init__(self, width: int, build: Build) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width, **build.storage))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)
        self.roles: Roles = {"weight": "router"}
        self.placements: Placements = {}
        if build.sequence_parallel:  # each rank sees its own tokens
            self.placements["weight"] = Partial(build.tp.name)

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, 1)."""
        return matmul(x, self.weight).sigmoid()
