"""Collectives of torch under the names that all supported versions understand.

torch 2.13 renamed them, and warns where the old names are called; 2.11 has only those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_coalesced(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    group: dist.ProcessGroup,
    async_op: bool,
) -> dist.Work:
    """Gather several tensors in one launch, which torch offers on the group alone.

    Each output has n times the elements of its input, among n ranks.
    """
    if hasattr(group, "all_gather_single_coalesced"):
        return group.all_gather_single_coalesced(list(outputs), list(inputs))
    return group.allgather_into_tensor_coalesced(list(outputs), list(inputs))
