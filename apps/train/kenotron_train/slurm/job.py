"""A training as a job of Slurm: whether it fits the nodes, and the script that sbatch is given."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from kenotron_config import ParallelismConfig
from kenotron_train.node_placement import ranks_on_nodes, ranks_per_node
from kenotron_train.slurm.durations import seconds_of

TEMPLATE = Path(__file__).with_name("job.sbatch")
_SET = {  # options of sbatch that the script has, and what sets them
    "nodes": "give --nodes",
    "job-name": "give --job-name",
    "ntasks": "change parallelism.dp, pp, cp or tp",
    "ntasks-per-node": "give --gpus-per-node",
    "gpus-per-node": "give --gpus-per-node",
    "cpus-per-task": "give --cpus-per-task",
    "time": "give --time",
    "signal": "give --stop-before",
    "requeue": "give --retries",
    "no-requeue": "give --retries 0",
    "output": "look into the folder of the job, below checkpoints_path,",
    "open-mode": "look into the folder of the job, below checkpoints_path,",
}
_ENDLESS = ("UNLIMITED", "INFINITE")


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """Request of a job to Slurm."""

    nodes: int
    """Nodes that train together."""
    gpus_per_node: int | None = None
    """GPUs of each node, one a process; 0: none, on CPUs; None: as many as there are processes."""
    name: str
    """Name of the job in the queue."""
    options: tuple[tuple[str, str], ...] = ()
    """Further options of sbatch, without the dashes, and their values; empty: none."""
    cpus_per_task: int | None = None
    """CPUs of each process; None: what Slurm gives."""
    time: str | None = None
    """Time that the job may run, as sbatch takes it; None: as long as the partition allows."""
    stop_before: int = 300
    """Seconds before the end of the time at which the ranks are asked to save and end."""
    retries: int = 2
    """Number of failures in a row that a new start may follow."""
    stall_limit: int | None = None
    """Seconds that a rank may let others wait; None: the training's default."""

    def ranks_per_node(self, sizes: ParallelismConfig) -> int:
        """Return the number of processes on each node; see `placement.ranks_per_node`."""
        return ranks_per_node(self.nodes, self.gpus_per_node, sizes)

    def check(self, sizes: ParallelismConfig) -> None:
        """Raise ValueError for what Slurm would refuse, or what would never train."""
        self.ranks_per_node(sizes)
        if not 0 < self.stop_before <= 65_535:
            raise ValueError(f"--stop-before {self.stop_before}: give 1 to 65535 seconds")
        limit = math.inf
        if self.time is not None and self.time.upper() not in _ENDLESS:
            try:
                limit = seconds_of(self.time, "minutes")
            except ValueError as error:
                raise ValueError(f"--time {error}, as sbatch takes it") from None
        if limit <= self.stop_before + 60:  # Slurm may be a minute early
            raise ValueError(
                f"--time {self.time} is {limit} s, and the ranks are asked to save and end "
                f"{self.stop_before} s, or up to 60 s more, before it is over: give more time or "
                "a smaller --stop-before"
            )
        for option, _ in self.options:
            if option in _SET:
                raise ValueError(f"--sbatch {option}: the script has it; {_SET[option]} instead")
        for option, value in (("job-name", self.name), *self.options):
            if not re.fullmatch(r"[a-z][a-z-]*", option) or not value.isprintable():
                raise ValueError(
                    f"--{option}={value!r} is no option of sbatch: write its long name without the "
                    "dashes, and a value on one line (constraint=h100)"
                )


def _check_path(what: str, path: str) -> None:
    """Refuse a path that would not stay on its line of the script."""
    if not path.isprintable():
        raise ValueError(
            f"{what} {path!r} has characters that cannot be printed, which would break out of the "
            "job's script: rename it"
        )


def script_of(
    job: SlurmJob, sizes: ParallelismConfig, folder: Path, command: list[str], cwd: Path
) -> str:
    """The script for sbatch.

    Args:
        job: what is asked for.
        sizes: of its mesh.
        folder: absolute; it keeps script, config and log.
        command: the interpreter and the program that trains.
        cwd: the folder to start it in.

    Raises:
        ValueError: see ``SlurmJob.check``; also for a path that cannot be printed.
    """
    job.check(sizes)
    python, program = command
    paths = {"checkpoints_path": str(folder), "the current folder": str(cwd)}
    for what, path in (paths | {"the interpreter": python, "the program": program}).items():
        _check_path(what, path)
    tasks = job.ranks_per_node(sizes)
    gpus = tasks if job.gpus_per_node is None else job.gpus_per_node
    asked = [*job.options]
    asked += [("gpus-per-node", str(gpus))] if gpus else []
    asked += [("cpus-per-task", str(job.cpus_per_task))] if job.cpus_per_task else []
    asked += [("time", job.time)] if job.time else []
    values = {
        "title": f"{ranks_on_nodes(sizes.world_size, job.nodes)}: {sizes.described}",
        "name": shlex.quote(job.name),
        "nodes": job.nodes,
        "tasks": tasks,
        "requests": "\n".join(_line(name, value) for name, value in asked),
        "log": shlex.quote(str(folder).replace("%", "%%") + "/%j.out"),
        "stop_before": job.stop_before,
        "folder": shlex.quote(str(folder)),
        "retries": job.retries,
        "cwd": shlex.quote(str(cwd)),
        "srun": f" --cpus-per-task={job.cpus_per_task}" if job.cpus_per_task else "",
        "python": shlex.quote(python),
        "program": shlex.quote(program),
        "flags": f" --stall-limit {job.stall_limit}" if job.stall_limit else "",
    }
    text = TEMPLATE.read_text(encoding="utf-8").replace("{{requests}}\n" * (not asked), "")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), text)


def _line(name: str, value: str) -> str:
    return f"#SBATCH --{name}" + (f"={shlex.quote(value)}" if value else "")
