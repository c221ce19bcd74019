"""Limits of a device, said once and with what helps: too little memory, no bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kenotron_cost import (
    OFFLOADED,
    CostPlan,
    MachineMemory,
    device_memory,
    shortage,
    stage_sizes,
    state_of_rank,
)
from kenotron_dist import Mesh
from kenotron_dist.launch import compute_capability

GB = 1e9
BFLOAT16_CAPABILITY = (8, 0)
"""The least compute capability with bfloat16 in hardware (Ampere)."""
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    _CPU_ALLOCATOR,
)
"""Words of errors for want of device memory; errors about other ranks hold them, too."""


class NotEnoughMemory(ValueError):
    """A device has too little memory for a rank's part of the training."""


@contextmanager
def device_errors(plan: CostPlan, mesh: Mesh) -> Iterator[None]:
    """Check the device of a rank, then explain what it runs out of.

    Raises:
        ValueError: the device has no bfloat16, and the model needs it.
        NotEnoughMemory: an allocation failed, on this rank or another one of its pipeline.
    """
    if mesh.device.type == "cuda":
        check_bfloat16(plan.dtype, compute_capability(), mesh.rank)
        check_device_memory(plan, mesh)
    try:
        yield
    except RuntimeError as error:
        if not any(word in f"{type(error).__name__}: {error}" for word in _OUT_OF_MEMORY):
            raise
        gpu = mesh.device.type != "cpu"
        memory = device_memory(mesh.device)
        text = explain_memory(plan, mesh.coords["pp"], str(error), memory, gpu=gpu)
        raise NotEnoughMemory(f"rank {mesh.rank}: {text}") from error


def check_bfloat16(dtype: torch.dtype, capability: tuple[int, int], rank: int) -> None:
    """Raise ValueError where a GPU of this compute capability has no bfloat16 and needs it."""
    if dtype == torch.bfloat16 and capability < BFLOAT16_CAPABILITY:
        raise ValueError(
            f"model.dtype: bfloat16 was given, but the GPU of rank {rank} has compute capability "
            f"{capability[0]}.{capability[1]}, and bfloat16 needs 8.0 (Ampere) or more; set "
            "model.dtype to float16 or float32, or general.device to cpu"
        )


def check_device_memory(plan: CostPlan, mesh: Mesh) -> None:
    """Raise NotEnoughMemory where the state of a rank is larger than its accelerator's memory."""
    memory, need = device_memory(mesh.device), state_of_rank(plan, "device")
    if memory is not None and need > memory.total:
        said = shortage(need, memory, "a rank", f"the GPU of rank {mesh.rank}")
        raise NotEnoughMemory(f"{said}. What helps: {'; '.join(remedies(plan, gpu=True))}")


def explain_memory(
    plan: CostPlan, pp_rank: int, error: str, memory: MachineMemory | None, *, gpu: bool = True
) -> str:
    """Describe what a rank needs by arithmetic, what its device has, and which keys help.

    Args:
        plan: of the run.
        pp_rank: the rank's place in the pipeline.
        error: what torch said.
        memory: that of the device; None: unknown.
        gpu: whether the device is a GPU, so that what is offloaded is not on it.
    """
    sizes = stage_sizes(plan)[pp_rank].bytes_of
    if gpu and plan.optimizer.offload:
        sizes = {what: size for what, size in sizes.items() if what not in OFFLOADED}
    parts = ", ".join(f"{what} {size / GB:.3g}" for what, size in sizes.items())
    there = ""
    if memory is not None:
        there = (
            f"; its device has {memory.total / GB:.3g} GB, of which {memory.free / GB:.3g} are free"
        )
    said = error[max(0, error.find(_CPU_ALLOCATOR)) :].strip().partition(". ")[0]
    return (
        f"not enough device memory: {said}. By arithmetic a rank of "
        f"this stage needs at least {sum(sizes.values()) / GB:.3g} GB ({parts}){there}. What "
        f"helps: {'; '.join(remedies(plan, gpu=gpu))}"
    )


def remedies(plan: CostPlan, *, gpu: bool) -> list[str]:
    """Name the keys that make a rank need less memory, those without cost first.

    Args:
        plan: of the run.
        gpu: whether the memory is that of a GPU.
    """
    parallel, optim, micro = plan.parallelism, plan.optimizer, plan.micro_batch_size
    found = []
    if not optim.zero.cuts_states and parallel.dp * parallel.cp > 1:
        found.append("optimizer.zero_stage: 1")
    if plan.dtype == torch.float32:
        found.append("model.dtype: bfloat16")
    if micro > 1:
        found.append(
            f"tokens.micro_batch_size below {micro}, with more batch_accumulation_per_replica"
        )
    if (room := parallel.recompute_memory_gb) is not None:
        found.append(f"parallelism.recompute_memory_gb below {room}")
    elif parallel.recompute_of(plan.spec.num_hidden_layers - 1) == "none":
        found.append("parallelism.recompute_layer: true")
    if optim.state_dtype == "float32":
        found.append("optimizer.state_dtype: bfloat16")
    if gpu and not optim.offload:
        found.append("optimizer.offload: true")
    if not optim.zero.cuts_parameters:
        found.append(f"optimizer.zero_stage: {'3' if optim.zero.cuts_gradients else '2 or 3'}")
    if optim.regather == "step":
        found.append("optimizer.regather: layer")
    if optim.zero_stage or parallel.dp == 1:
        found.append(f"more parallelism.dp, with optimizer.zero_stage: {optim.zero_stage or 1}")
    return [*found, "more parallelism.tp or pp"]
