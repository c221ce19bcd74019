"""A world of which this process is one rank, and the others do not exist.

Tensors are on meta: they have shapes and no values, nothing is sent, and what would be is recorded
(``record``). Control messages are on the CPU, where torch's fake process group does nothing: every
other rank has what this one has. Where a number of a tensor decides what happens next, a rank
decides as in an ordinary step (``host_numbers``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

FAKE = "fake"
"""Name of the backend."""
FAKE_NCCL = "fake_nccl"
"""Name of another, on the CPU with NCCL's semantics (``proof.fake_nccl``)."""


def join_fake_world(rank: int, size: int, device: torch.device | str | None) -> None:
    """Make the default process group, of ``size`` ranks, in which this process is ``rank``.

    ``device``: meta, or another one whose tensors have no values, as in tests of GPU paths.

    Raises:
        ValueError: there is no such rank, the device is the CPU, or this process is in a world.
    """
    if device is not None and torch.device(device).type == "cpu":
        raise ValueError(
            f"device {device} was given with backend 'fake', whose ranks have no values: leave it "
            "out, or give 'meta'"
        )
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a world of {size}: give one from 0 to {size - 1}")
    if dist.is_initialized():
        raise ValueError(
            f"this process is rank {dist.get_rank()} of a world of {dist.get_world_size()} already:"
            " close its mesh (Mesh.close) before it is a rank of another one"
        )
    # What TORCH_DISTRIBUTED_DEBUG=DETAIL checks, it asks of ranks that do not exist.
    dist.set_debug_level(dist.DebugLevel.OFF)
    dist.init_process_group(FAKE, rank=rank, world_size=size, store=dist.HashStore())


def leave_fake_world() -> None:
    """Undo ``join_fake_world``; nothing happens where that was done."""
    if dist.is_initialized():
        dist.destroy_process_group()
        dist.set_debug_level_from_env()


def host_numbers(scalars: Sequence[Tensor], on_meta: float = 0.0) -> list[float]:
    """Read scalars () on the host, at once, which waits for the device; ``on_meta`` on meta."""
    if not scalars or scalars[0].is_meta:
        return [on_meta] * len(scalars)
    return torch.stack(list(scalars)).tolist()
