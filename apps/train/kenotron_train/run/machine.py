"""Whether this machine is large enough for a run: its memory, its cores, and its GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kenotron_config import Config
from kenotron_dist import gpu_problem, usable_cores, visible_gpus
from kenotron_dist.launch import local_ranks
from kenotron_models import expert_parameters, parameter_count
from kenotron_optim import MuonConfig, SGDConfig

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
class Memory:
    """Bytes of one device's memory, or of the host's."""

    free: float
    total: float


def check_machine(config: Config) -> None:
    """Refuse what this host cannot hold or start, before its ranks are started.

    Raises:
        ValueError: one line for each problem, `key: value was given; what there is; what helps`.
    """
    found = [*_too_many(config)]
    memory = None if _on_gpus(config) else host_memory()
    if memory is not None:
        ranks = local_ranks(config.world_size)
        need = state_of_rank(config) * ranks
        if need > memory.total:
            found.append(shortage(need, memory, f"the {ranks} ranks of this host", "this host"))
    if found:
        raise ValueError("\n".join(found))


def machine_cautions(config: Config) -> list[str]:
    """Name what does not fit into the memory that is free here: a run may be elsewhere.

    It reads a GPU's memory where there is one, after which this process must not start ranks.

    Returns:
        No line, or one for the host (its GPU, where ranks would compute on GPUs).
    """
    if not _on_gpus(config):
        return host_cautions(config)
    memory, need = device_memory(torch.device("cuda", 0)), state_of_rank(config)
    if memory is None or need <= memory.free:
        return []
    return [shortage(need, memory, "a rank", "the GPU here")]


def without_gpus(config: Config) -> list[str]:
    """Name what asks for GPUs where this machine has none that ranks can use.

    Returns:
        One line for each, `key.path: what was given; what to do`; empty when it can be run.
    """
    there, model, device = visible_gpus(), config.model, config.general.device
    elsewhere = f"; no GPU can be used here ({gpu_problem()}); check it on a machine with GPUs"
    if device == "cuda" and not there:
        return [f"general.device: cuda was given{elsewhere}, or give auto or cpu"]
    if model.cuda_graph and device == "cpu":
        return ["model.cuda_graph: true was given with general.device cpu; set it to false"]
    if model.cuda_graph and not there:
        return [f"model.cuda_graph: true was given{elsewhere}, or set it to false"]
    return []


def beyond_any_machine(config: Config) -> list[str]:
    """Name a model of which one rank's share fits into no machine that there is."""
    if (need := state_of_rank(config)) <= LARGEST:
        return []
    return [
        "model.model_config: parameters, gradients and the optimizer's state of a rank need "
        f"{need / GB:,.3g} GB, and no machine has more than {LARGEST / GB:,.3g}; make the model "
        "smaller, or cut it into more parts (parallelism.tp, pp and ep)"
    ]


def host_cautions(config: Config) -> list[str]:
    """Name what does not fit into the host's free memory; nothing where ranks have GPUs."""
    memory, ranks = host_memory(), local_ranks(config.world_size)
    need = state_of_rank(config) * ranks
    if memory is None or need <= memory.free or _on_gpus(config):
        return []
    return [shortage(need, memory, f"{ranks} rank{'s' * (ranks != 1)} on one host", "this host")]


def shortage(need: float, memory: Memory, who: str, place: str) -> str:
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
        "(parallelism.tp and pp; dp with optimizer.zero_stage: 1)"
    )


def device_memory(device: torch.device) -> Memory | None:
    """Memory of an accelerator, or the host's for a CPU; None where it is not known."""
    if device.type == "cpu":
        return host_memory()
    free, total = torch.get_device_module(device).mem_get_info(device)
    return Memory(free, total)


def host_memory(root: Path = _ROOT) -> Memory | None:
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
    return Memory(free, total)


def _fields(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, _, rest = line.partition(":")
        yield name, rest


def _too_many(config: Config) -> Iterator[str]:
    """Ranks and loading threads that this machine cannot work with."""
    cores = usable_cores()
    most = max(ALWAYS_ALLOWED, MOST_PER_CORE * cores)
    ranks, sizes = local_ranks(config.world_size), config.parallelism
    if ranks > most:
        yield (
            f"parallelism: {sizes.described} are {ranks} ranks on this "
            f"host, which has {cores} cores and takes at most {most} ranks; make dp, pp, cp or tp "
            "smaller, or start it on more hosts (docs/launching.md)"
        )
    for number, stage in enumerate(config.data_stages):
        if (workers := stage.data.num_loading_workers) > most:
            yield (
                f"data_stages.{number}.data.num_loading_workers: {workers} was given; this host "
                f"has {cores} cores and takes at most {most}; a few are enough"
            )


def _on_gpus(config: Config) -> bool:
    """Whether each rank of this host has a GPU, and may use it."""
    gpus = visible_gpus() if config.general.device != "cpu" else 0
    return gpus > 0 and gpus >= local_ranks(config.world_size)


def state_of_rank(config: Config) -> float:
    """Mean bytes of what a rank keeps between steps, without a model being built."""
    parallel = config.parallelism
    routed = expert_parameters(config.decoder)
    dense = (parameter_count(config.decoder) - routed) // (parallel.tp * parallel.pp)
    routed //= parallel.ep * parallel.pp
    return float(sum(state_bytes(config, dense, routed).values()))


def state_bytes(config: Config, dense: int, routed: int = 0) -> dict[str, int]:
    """Bytes of a rank's parameters, gradients and optimizer state.

    Args:
        config: that of the run.
        dense: parameters of a rank that all ranks of dp and cp have.
        routed: parameters of experts of a rank, which one in ep ranks of a stage has.
    """
    optim, parallel = config.optimizer, config.parallelism
    width = getattr(torch, config.model.dtype).itemsize
    data = parallel.dp * parallel.cp if optim.zero_stage else 1
    expert_data = parallel.dp * parallel.cp * parallel.tp // parallel.ep if optim.zero_stage else 1
    count, owned = dense + routed, dense // data + routed // expert_data
    rule = optim.optimizer_factory
    states = 0 if isinstance(rule, SGDConfig) else 1 if isinstance(rule, MuonConfig) else 2
    return {
        "parameters": count * width,
        "gradients": count * (4 if optim.accumulate_grad_in_fp32 else width),
        "fp32 masters": 0 if width == 4 else owned * 4,
        "optimizer": states * owned * getattr(torch, optim.state_dtype).itemsize,
    }
