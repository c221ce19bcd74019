"""RMSNorm of a gated output, over groups of features that tp may cut.

Shapes: T tokens, C features in G groups; ``/t`` is divided by tp size, g groups of this rank.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import Roles
from kenotron_dist.autograd import copy_to, reduce_from
from kenotron_dist.placement import Placements, Shard
from kenotron_models.build import Build
from kenotron_models.recompute import whole


class GatedGroupNorm(nn.Module):
    """``v / sqrt(mean(v^2) + eps) * weight``, v = y silu(z), the mean over a group; in fp32.

    ``weight`` (C/t,) is cut as the features are. Where tp divides the groups no mean crosses ranks;
    with more ranks than groups, ``means`` sums over those that share one.

    Args:
        features: C.
        groups: G; G and tp divide one another.
        eps: added to the mean of squares.
        build: how and where.
    """

    def __init__(self, features: int, groups: int, eps: float, build: Build) -> None:
        super().__init__()
        self.eps, self.axis, self.all_groups = eps, build.tp, groups
        self.sharers = max(build.tp.size // groups, 1)
        """Ranks that share a group."""
        self.first_group = build.tp.rank // self.sharers * max(groups // build.tp.size, 1)
        self.groups = max(groups // build.tp.size, 1)  # g
        self.group_size = features // groups
        own = features // build.tp.size
        self.weight = nn.Parameter(torch.ones(own, **build.storage))  # (C/t,)
        self.roles: Roles = {"weight": "norm"}
        self.placements: Placements = {"weight": Shard(build.tp.name, 0)}

    def means(self, y: Tensor, z: Tensor, *, again: bool = False) -> Tensor:
        """Return the mean of squares of each group of this rank: (T, C/t) twice -> (T, g).

        One all-reduce over tp where ranks share a group, forward and backward. ``again``: what is
        squared is computed again in the backward.
        """
        own = self.sums(y, z, again=again)
        if self.sharers > 1:
            # Each rank's result depends on the squares of all that share its group.
            own = self.own_group(copy_to(reduce_from(own, self.axis), self.axis))
        return own / self.group_size

    def sums(self, y: Tensor, z: Tensor, *, again: bool = False) -> Tensor:
        """Return this rank's sums of squares of its groups (T, g); of all groups (T, G) where
        ranks share some, 0 for others'. Arguments are those of ``means``."""
        sums = partial(self._squares, z=z)
        own = whole(sums, y) if again and torch.is_grad_enabled() else sums(y)
        if self.sharers == 1:
            return own
        return F.pad(own, (self.first_group, self.all_groups - 1 - self.first_group))

    def own_group(self, x: Tensor) -> Tensor:
        """(T, G) -> (T, 1) of the group that this rank shares."""
        return x[:, self.first_group : self.first_group + 1]

    def forward(self, y: Tensor, z: Tensor, means: Tensor) -> Tensor:
        """Return the normed output (T, C/t) of y and z, in the dtype of y; means are (T, g)."""
        scale = (means + self.eps).rsqrt()[..., None]
        v = (_gated(y, z).unflatten(-1, (self.groups, -1)) * scale).flatten(-2)
        return v.to(y.dtype) * self.weight

    def _squares(self, y: Tensor, z: Tensor) -> Tensor:
        return _gated(y, z).square().unflatten(-1, (self.groups, -1)).sum(-1)


def _gated(y: Tensor, z: Tensor) -> Tensor:
    """y silu(z), in fp32 or wider."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return y.to(wide) * F.silu(z.to(wide))
