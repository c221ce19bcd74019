"""Which device a rank computes on, and the backend that goes with it."""

from __future__ import annotations

import torch
import torch.distributed as dist


def choose_device(
    device: str | None, backend: str | None, gpus: int, needed: int
) -> tuple[str, str]:
    """Device type and backend: cuda and nccl when there are GPUs enough, else cpu and gloo. Pure.

    Arguments: what was asked for, or None; visible GPUs; GPUs that the local ranks need. Raises
    ValueError for an unknown name, a combination that cannot work, or too few GPUs.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device {device!r} is neither 'cpu' nor 'cuda'")
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"backend {backend!r} is neither 'gloo' nor 'nccl'")
    if device == "cpu" and backend == "nccl":
        raise ValueError("backend 'nccl' needs device 'cuda': use 'gloo' on the cpu")
    wants_gpu = device == "cuda" or backend == "nccl"
    if wants_gpu and gpus < needed:
        raise ValueError(
            f"{needed} local rank{'s' if needed > 1 else ''} need as many GPUs, but "
            f"{gpus} can be seen: start fewer processes on this host, or choose device 'cpu'"
        )
    if wants_gpu or (device is None and backend is None and gpus >= needed):
        return "cuda", backend or "nccl"
    return "cpu", "gloo"


def visible_gpus() -> int:
    """GPUs that this process may use with NCCL; does not touch them."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda" or not dist.is_nccl_available():
        return 0
    return torch.accelerator.device_count()
