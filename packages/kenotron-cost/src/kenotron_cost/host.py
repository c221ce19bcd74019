"""Checks that this machine is large enough for a run: its memory, its cores, and its GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kenotron_config import Device, ParallelismConfig
from kenotron_cost.cost_plan import CostPlan
from kenotron_cost.state_bytes import state_of_rank
from kenotron_data.config import DatasetStageConfig
from kenotron_dist import gpu_problem, usable_cores, visible_gpus
from kenotron_dist.launch import local_ranks

GB = 1e9
MOST_PER_CORE = 32
"""Ranks, or threads that load data, for each core: with more of them a machine is busy with
starting and switching them alone."""
ALWAYS_ALLOWED = 64
"""Ranks, or loading threads, that no machine refuses."""
LARGEST = 64e12
"""Bytes of memory that no machine gives to one process."""
_ROOT = Path("/")


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of one device's memory, or of the host's."""

    free: float
    total: float


def check_machine(plan: CostPlan, stages: Sequence[DatasetStageConfig]) -> None:
    """Refuse what this host cannot hold or start, before its ranks are started.

    Raises:
        ValueError: one line for each problem, `key: value was given; what there is; what helps`.
    """
    found = [*_too_many(plan.parallelism, stages)]
    memory, ranks = host_memory(), local_ranks(plan.parallelism.world_size)
    if memory is not None and _on_gpus(plan):
        found += _offload_shortage(plan, memory, memory.total)
    elif memory is not None and (need := state_of_rank(plan) * ranks) > memory.total:
        found.append(shortage(need, memory, f"the {ranks} ranks of this host", "this host"))
    if found:
        raise ValueError("\n".join(found))


def machine_cautions(plan: CostPlan) -> list[str]:
    """Name what does not fit into the memory that is free here: a run may be elsewhere.

    It reads a GPU's memory where there is one, after which this process must not start ranks.

    Returns:
        A line for the host, or for its GPU and for what is offloaded from it, where it is short.
    """
    if not _on_gpus(plan):
        return host_cautions(plan)
    found, host = list[str](), host_memory()
    memory, need = device_memory(torch.device("cuda", 0)), state_of_rank(plan, "device")
    if memory is not None and need > memory.free:
        found.append(shortage(need, memory, "a rank", "the GPU here"))
    return found + (_offload_shortage(plan, host, host.free) if host else [])


def without_gpus(device: Device, *, cuda_graph: bool) -> list[str]:
    """Name what asks for GPUs where this machine has none that ranks can use.

    Args:
        device: ``general.device``.
        cuda_graph: ``model.cuda_graph``.

    Returns:
        One line for each, `key.path: what was given; what to do`; empty when it can be run.
    """
    there = visible_gpus()
    elsewhere = f"; no GPU can be used here ({gpu_problem()}); check it on a machine with GPUs"
    if device == "cuda" and not there:
        return [f"general.device: cuda was given{elsewhere}, or give auto or cpu"]
    if cuda_graph and device == "cpu":
        return ["model.cuda_graph: true was given with general.device cpu; set it to false"]
    if cuda_graph and not there:
        return [f"model.cuda_graph: true was given{elsewhere}, or set it to false"]
    return []


def beyond_any_machine(plan: CostPlan) -> list[str]:
    """Name a model of which one rank's share fits into no machine that there is."""
    if (need := state_of_rank(plan)) <= LARGEST:
        return []
    return [
        "model.model_config: parameters, gradients and the optimizer's state of a rank need "
        f"{need / GB:,.3g} GB, and no machine has more than {LARGEST / GB:,.3g}; make the model "
        "smaller, or cut it into more parts (parallelism.tp, pp and ep)"
    ]


def host_cautions(plan: CostPlan) -> list[str]:
    """Name what this host is short of: memory and cores; nothing where ranks have GPUs."""
    if _on_gpus(plan):
        return []
    memory, cores = host_memory(), usable_cores()
    ranks = local_ranks(plan.parallelism.world_size)
    need, found = state_of_rank(plan) * ranks, list[str]()
    if memory is not None and need > memory.free:
        found.append(
            shortage(need, memory, f"{ranks} rank{'s' * (ranks != 1)} on one host", "this host")
        )
    if ranks > cores:
        found.append(
            f"parallelism: {ranks} ranks share the {cores} core{'s' * (cores != 1)} of this host: "
            "no step is faster than on as many ranks as there are cores"
        )
    return found


def shortage(need: float, memory: MachineMemory, who: str, place: str) -> str:
    """Describe what is needed and what there is.

    Args:
        need: bytes of parameters, gradients and the optimizer's state.
        memory: of the device or host.
        who: whose bytes these are.
        place: whose memory it is.
    """
    return (
        f"model.model_config: parameters, gradients and the optimizer's state of {who} need "
        f"{need / GB:,.3g} GB, but {place} has {memory.total / GB:,.3g} GB, of which "
        f"{memory.free / GB:,.3g} are free; make the model smaller, or spread it over more hosts "
        "(parallelism.tp and pp; dp with optimizer.zero_stage: 1, 2 or 3)"
    )


def device_memory(device: torch.device) -> MachineMemory | None:
    """Memory of an accelerator, or the host's for a CPU; None where it is not known."""
    if device.type == "cpu":
        return host_memory()
    free, total = torch.get_device_module(device).mem_get_info(device)
    return MachineMemory(free, total)


def host_memory(root: Path = _ROOT) -> MachineMemory | None:
    """Memory of this host, swap included, within the limit of its control group.

    Args:
        root: where Linux's files are.

    Returns:
        None where there are no such files.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024.0 for name, rest in _fields(lines)}
        free = sizes["MemAvailable"] + sizes.get("SwapFree", 0)
        total = sizes["MemTotal"] + sizes.get("SwapTotal", 0)
    except (OSError, ValueError, KeyError, IndexError):
        return None
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: there is no limit
        group = root / "sys/fs/cgroup"
        limit = float(int((group / "memory.max").read_text()))
        used = float(int((group / "memory.current").read_text()))
        total, free = min(total, limit), min(free, max(0.0, limit - used))
    return MachineMemory(free, total)


def _fields(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, _, rest = line.partition(":")
        yield name, rest


def _too_many(sizes: ParallelismConfig, stages: Sequence[DatasetStageConfig]) -> Iterator[str]:
    """Ranks and loading threads that this machine cannot work with."""
    cores = usable_cores()
    most = max(ALWAYS_ALLOWED, MOST_PER_CORE * cores)
    ranks = local_ranks(sizes.world_size)
    if ranks > most:
        yield (
            f"parallelism: {sizes.described} are {ranks} ranks on this "
            f"host, which has {cores} cores and takes at most {most} ranks; make dp, pp, cp or tp "
            "smaller, or start it on more hosts (docs/launching.md)"
        )
    for number, stage in enumerate(stages):
        if (workers := stage.data.num_loading_workers) > most:
            yield (
                f"data_stages.{number}.data.num_loading_workers: {workers} was given; this host "
                f"has {cores} cores and takes at most {most}; a few are enough"
            )


def _on_gpus(plan: CostPlan) -> bool:
    """Return whether each rank of this host has a GPU, and may use it."""
    gpus = visible_gpus() if plan.device != "cpu" else 0
    return gpus > 0 and gpus >= local_ranks(plan.parallelism.world_size)


def _offload_shortage(plan: CostPlan, memory: MachineMemory, there: float) -> list[str]:
    """Describe a host that cannot hold what its GPUs offload; no line where it can."""
    ranks = local_ranks(plan.parallelism.world_size)
    if (need := state_of_rank(plan, "host") * ranks) <= there:
        return []
    return [
        f"optimizer.offload: true was given; masters and optimizer state of the {ranks} ranks of "
        f"this host need {need / GB:,.3g} GB of its memory, but it has {memory.total / GB:,.3g} "
        f"GB, of which {memory.free / GB:,.3g} are free; set it to false, or spread the model over "
        "more hosts (parallelism.tp and pp; dp with optimizer.zero_stage: 1, 2 or 3)"
    ]
