"""Rank of this process, from the variables that its launcher set. Pure.

torchrun (and variables set by hand) come first, then Open MPI, a Slurm step, and MPICH-like
launchers: torchrun may run inside the others, and mpirun inside Slurm. Variables that contradict
one another are an error, because a rank guessed wrong hangs.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from kenotron_dist import slurm

_LOOPBACK = "127.0.0.1"
_DEFAULT_PORT = 29_500
_OUTSIDE_SRUN = ("4294967290", "4294967291")  # the steps of salloc's shell and of sbatch's script


@dataclass(frozen=True)
class World:
    """This process among all that were started together."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the processes on this host."""
    local_world_size: int
    master_address: str
    """Host of the store: that of rank 0, or of the launcher's agent."""
    master_port: int
    launcher: Literal["torchrun", "slurm", "mpi", "none"]
    """``torchrun`` also stands for RANK and WORLD_SIZE set by hand."""
    restart_count: int = 0
    """Number of times that the launcher has started all of them again."""
    agent_store: bool = False
    """True where the launcher hosts the store."""

    @property
    def is_local(self) -> bool:
        """True where all ranks are on this host."""
        return self.local_world_size == self.world_size


def resolve(environ: Mapping[str, str]) -> World:
    """The place of this process in the world; a world of one when no launcher speaks.

    Raises ValueError naming the variables, their values and the remedy, when they are incomplete,
    are no numbers, or contradict one another.
    """
    env = _Variables(environ)
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torchrun(env)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _mpi(env, "OMPI_COMM_WORLD_", ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    if "SLURM_PROCID" in environ:
        return _slurm(env)
    if "PMI_RANK" in environ:
        return _mpi(env, "", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
    if "PMIX_RANK" in environ:
        env.fail(
            ["PMIX_RANK"], "does not say how many ranks there are", "start with mpirun or srun"
        )
    return World(0, 1, 0, 1, _LOOPBACK, 0, "none")


def check_tasks(world: World, ranks: int) -> None:
    """Raise ValueError for the only task of Slurm or MPI that shall be a mesh of several ranks.

    A shell that ``srun --pty`` has opened gives its variables to every program.
    """
    starts = {
        "slurm": ("Slurm (srun, or a shell of srun --pty)", f"srun --ntasks {ranks}",
                  "SLURM_STEP_ID and SLURM_STEPID"),
        "mpi": ("MPI", f"mpirun -n {ranks}", "OMPI_COMM_WORLD_RANK, PMI_RANK and PMIX_RANK"),
    }  # fmt: skip
    if world.world_size == 1 and ranks > 1 and world.launcher in starts:
        name, command, variables = starts[world.launcher]
        raise ValueError(
            f"{name} started this process as its only task, and the mesh has {ranks} ranks: start "
            f"it with {command}, or unset {variables}, so that it starts its ranks itself"
        )


class _Variables:
    """Variables that are read as numbers and shown in errors."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.all = environ

    def has(self, *names: str) -> bool:
        return all(name in self.all for name in names)

    def first(self, *names: str) -> str | None:
        return next((name for name in names if self.all.get(name)), None)

    def number(self, name: str, default: int | None = None, least: int = 0) -> int:
        text = self.all.get(name)
        if text is None and default is not None:
            return default
        if text is None:
            self.fail([name], "is not set", f"start with a launcher that sets it, or set {name}")
        try:
            value = int(text)
        except ValueError:
            self.fail([name], "is not a whole number", f"correct or unset {name}")
        if value < least:
            self.fail([name], f"is less than {least}", f"correct or unset {name}")
        return value

    def fail(self, names: list[str], what: str, remedy: str) -> NoReturn:
        shown = ", ".join(
            f"{name}={self.all[name]}" if name in self.all else name for name in names
        )
        raise ValueError(f"{shown} {what}: {remedy}")

    def below(self, names: tuple[str, str], rank: int, size: int) -> None:
        if rank >= size:
            remedy = f"ranks count from 0 to {size - 1}"
            self.fail(list(names), "do not fit together", remedy)

    def port(self, default: int) -> int:
        port = self.number("MASTER_PORT", default, least=1)
        if port > 65_535:
            self.fail(["MASTER_PORT"], "is no port", "choose one from 1024 to 65535")
        return port


def _torchrun(env: _Variables) -> World:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if not env.has(other):
            env.fail(
                [name, other], f"contradict: {other} is missing", f"set {other} or unset {name}"
            )
    rank, size = env.number("RANK"), env.number("WORLD_SIZE", least=1)
    env.below(("RANK", "WORLD_SIZE"), rank, size)
    by_hand = not env.has("TORCHELASTIC_RUN_ID")
    if by_hand:
        _check_agreement(env, rank, size)
    local_rank, local_size = _local(env, rank, size)
    env.below(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), local_rank, local_size)
    if local_size > size or (by_hand and size % local_size):
        what = "contradict: the world is not made of whole hosts"
        remedy = "WORLD_SIZE is LOCAL_WORLD_SIZE times the number of hosts"
        env.fail(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], what, remedy)
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not env.all.get(name):
                what = f"are not enough: {name} is missing"
                remedy = f"set {name} to one value on all ranks, or start with torchrun"
                env.fail(["RANK", "WORLD_SIZE"], what, remedy)
    return World(
        rank,
        size,
        local_rank,
        local_size,
        env.all.get("MASTER_ADDR") or _LOOPBACK,
        env.port(_DEFAULT_PORT),
        "torchrun",
        env.number("TORCHELASTIC_RESTART_COUNT", 0),
        env.all.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _local(env: _Variables, rank: int, size: int) -> tuple[int, int]:
    """LOCAL_RANK and LOCAL_WORLD_SIZE, which may be left out where all ranks are on one host."""
    if env.has("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        return env.number("LOCAL_RANK"), env.number("LOCAL_WORLD_SIZE", least=1)
    one_host = size == 1 or env.all.get("MASTER_ADDR") in (_LOOPBACK, "localhost", "::1")
    if one_host and not env.has("LOCAL_WORLD_SIZE"):
        return env.number("LOCAL_RANK", rank), size
    missing = "LOCAL_RANK" if env.has("LOCAL_WORLD_SIZE") else "LOCAL_WORLD_SIZE"
    what = f"are not enough: {missing} is missing, and this may not be the only host"
    env.fail(["RANK", "WORLD_SIZE"], what, f"set {missing}, or start with torchrun")


def _check_agreement(env: _Variables, rank: int, size: int) -> None:
    """RANK set by hand must be the rank that MPI or Slurm gave to the same set of processes."""
    pairs = [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]
    if _in_step(env):
        pairs.append(("SLURM_PROCID", env.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or ""))
    for theirs, total in pairs:
        if not env.has(theirs, total):
            continue
        same_processes = env.number(total) == size or theirs.startswith("OMPI")
        if same_processes and (env.number(theirs), env.number(total)) != (rank, size):
            names = ["RANK", "WORLD_SIZE", theirs, total]
            remedy = "unset RANK and WORLD_SIZE and let the launcher speak"
            env.fail(names, "contradict one another", remedy)


def _mpi(env: _Variables, prefix: str, names: tuple[str, str, str, str]) -> World:
    ranks, sizes, local_ranks, local_sizes = (prefix + name for name in names)
    rank, size = env.number(ranks), env.number(sizes, least=1)
    local_rank, local_size = env.number(local_ranks), env.number(local_sizes, least=1)
    env.below((ranks, sizes), rank, size)
    env.below((local_ranks, local_sizes), local_rank, local_size)
    address = env.all.get("MASTER_ADDR")
    if not address and local_size < size:
        what = "span several hosts, but MASTER_ADDR is missing"
        remedy = "pass the host of rank 0 to all (mpirun -x MASTER_ADDR=host ...)"
        env.fail([sizes, local_sizes], what, remedy)
    job = env.first("PMIX_NAMESPACE", "PMI_PORT", "PMI_ID")
    default = slurm.port(zlib.crc32(env.all[job].encode()), 0) if job else _DEFAULT_PORT
    port = env.port(default)
    return World(rank, size, local_rank, local_size, address or _LOOPBACK, port, "mpi")


def _in_step(env: _Variables) -> bool:
    """Return whether srun started this process."""
    step = env.first("SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and env.all[step] not in _OUTSIDE_SRUN


def _slurm(env: _Variables) -> World:
    tasks = "SLURM_NTASKS"
    if not _in_step(env):
        if env.number(tasks, 1) > 1:
            what = "ask for several processes, but srun did not start this one"
            env.fail([tasks, "SLURM_PROCID"], what, "write srun before the command in the script")
        return World(0, 1, 0, 1, _LOOPBACK, 0, "none")
    tasks = env.first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or tasks
    rank, size = env.number("SLURM_PROCID"), env.number(tasks, least=1)
    env.below(("SLURM_PROCID", tasks), rank, size)
    local_rank, local_size = env.number("SLURM_LOCALID"), _tasks_here(env, tasks, size)
    nodes = env.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    address = env.all.get("MASTER_ADDR")
    if not address and size > 1:
        if nodes is None:
            what = "start several processes, but SLURM_STEP_NODELIST is missing"
            env.fail([tasks], what, "set MASTER_ADDR to the host of rank 0")
        try:
            address = slurm.hosts(env.all[nodes])[0]
        except ValueError as error:
            env.fail([nodes], f"cannot be read ({error})", "set MASTER_ADDR to the host of rank 0")
    step = env.first("SLURM_STEP_ID", "SLURM_STEPID") or ""
    default = slurm.port(env.number("SLURM_JOB_ID", 0), env.number(step))
    return World(
        rank,
        size,
        local_rank,
        local_size,
        address or _LOOPBACK,
        env.port(default),
        "slurm",
        env.number("SLURM_RESTART_COUNT", 0),
    )


def _tasks_here(env: _Variables, tasks: str, size: int) -> int:
    """Return how many of the step's tasks run on this node."""
    name = env.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if name is not None:
        try:
            counts = slurm.tasks_per_node(env.all[name])
        except ValueError as error:
            env.fail([name], f"cannot be read ({error})", f"correct or unset {name}")
        node = env.number("SLURM_NODEID", 0)
        if sum(counts) != size or node >= len(counts):
            env.fail([tasks, name], "contradict one another", "start with srun, and unset both")
        here = counts[node]
    elif env.has("SLURM_NTASKS_PER_NODE"):
        name = "SLURM_NTASKS_PER_NODE"
        here = min(env.number(name, least=1), size)
    else:
        name = env.first("SLURM_STEP_NUM_NODES", "SLURM_NNODES") or "SLURM_NNODES"
        if env.number(name, 1) > 1:
            what = "nodes, but no variable says how many tasks run on each"
            env.fail([name], what, "start srun with --ntasks-per-node")
        here = size
    env.below(("SLURM_LOCALID", name), env.number("SLURM_LOCALID"), here)
    return here
