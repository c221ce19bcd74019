"""The evaluation of a checkpoint as a job of Slurm: its script, and giving it to sbatch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kenotron_config import EnvText, EvaluationJobConfig, Mask, ParallelismConfig
from kenotron_dist import MeshConfig
from kenotron_train.evaluate.results import FOLDER

TEMPLATE = Path(__file__).with_name("evaluate.sbatch")
OF_THE_TRAINING = re.compile(
    r"SLURM_|SBATCH_|SRUN_|PMI|OMPI_|TORCHELASTIC_|KENOTRON_JOB_SECRET$|MASTER_(ADDR|PORT)$"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)$"
)
"""Variables that a launcher gives the ranks of the training, and that a job must not see."""
PATIENCE = 60.0
"""Seconds that sbatch may take: all ranks of the training wait for it."""
_OPTIONS = ("partition", "account", "qos", "reservation", "time")


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """Request of a training's jobs to Slurm, and what they take from the training."""

    asked: EvaluationJobConfig
    trained: ParallelismConfig
    """Sizes that the section leaves open."""
    project: str
    run: str
    """``checkpoints_path``, which may be a variable's."""
    mask: Mask


def submit_evaluation(job: EvaluationJob, step_folder: Path) -> str:
    """Write the script of a job that evaluates a checkpoint, and give it to sbatch.

    The script stays in ``evaluations`` next to the step folders. Where there is no sbatch, nothing
    is submitted, and the message has the command.

    Returns:
        A line for the log.

    Raises:
        ValueError: sbatch refused the job, or did not answer; or as ``script_of_evaluation``.
        OSError: the script cannot be written.
    """
    folder = step_folder.parent / FOLDER
    command = evaluate_command(job, step_folder)
    script = script_of_evaluation(job, step_folder, Path.cwd())
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{step_folder.name}.sbatch"
    file.write_text(script, encoding="utf-8")
    if shutil.which("sbatch") is None:
        return (
            f"evaluation of step {step_folder.name}: sbatch is not there, so run it where you "
            f"like: {shlex.join(command)}"
        )
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", f"--output={_log(step_folder)}", str(file)],
            capture_output=True, text=True, check=False, env=outside(os.environ), timeout=PATIENCE,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"sbatch did not answer within {PATIENCE:g} s: submit {file} once it does"
        ) from error
    if done.returncode:
        why = done.stderr.strip().removeprefix("sbatch: error: ")
        raise ValueError(f"sbatch refused {file} ({why}): correct evaluate.job")
    return f"evaluation of step {step_folder.name}: submitted job {done.stdout.strip()}"


def _log(step_folder: Path) -> str:
    return str(step_folder.parent / FOLDER / f"{step_folder.name}.out").replace("%", "%%")


def _word(text: str, named: str) -> str:
    """Quote a word of the script; the part that `!env` has read is read again by the shell."""
    if not isinstance(named, EnvText) or not named or named not in text:
        return shlex.quote(text)
    name, *other = named.written.split(" ", 1)
    variable = "${" + name + (f":-{other[0]}" if other else "") + "}"
    before, _, after = text.partition(named)
    return "".join((before and shlex.quote(before), f'"{variable}"', after and shlex.quote(after)))


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a launcher added to it."""
    return {key: text for key, text in environment.items() if not OF_THE_TRAINING.match(key)}


def evaluate_command(job: EvaluationJob, step_folder: Path) -> list[str]:
    """Return the command that evaluates a checkpoint on the ranks of the job."""
    sizes = sizes_of(job.trained, job.asked)
    flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    if job.asked.gpus_per_node == 0:
        flags += ["--device", "cpu"]
    return [*own_program(), "evaluate", "--ckpt-path", str(step_folder), *flags]


def sizes_of(trained: ParallelismConfig, job: EvaluationJobConfig) -> dict[str, int]:
    """Return the sizes of the job's mesh; those that it leaves open are the training's."""
    return {
        "pp": job.pp or trained.pp, "dp": job.dp, "cp": job.cp, "tp": job.tp or trained.tp,
        "ep": job.ep or trained.ep,
    }  # fmt: skip


def own_program() -> list[str]:
    """Return the words that start this program: of a checkout, else the installed one."""
    app = Path(__file__).resolve().parents[2]
    if (app / "__main__.py").is_file():
        return [sys.executable, str(app)]
    return [str(Path(sys.executable).with_name("kenotron-train"))]


def script_of_evaluation(job: EvaluationJob, step_folder: Path, cwd: Path) -> str:
    """Return the script for sbatch.

    Raises ValueError for sizes that are no mesh, where ranks cannot be divided among the nodes
    evenly, and for a value that would not stay on its line.
    """
    asked, hidden, sizes = job.asked, job.mask, sizes_of(job.trained, job.asked)
    try:
        _ = MeshConfig(**sizes).expert_sizes
    except ValueError as error:
        raise ValueError(f"evaluate.job: {error}, or another dp, cp or tp, there") from error
    ranks = sizes["pp"] * sizes["dp"] * sizes["cp"] * sizes["tp"]
    tasks = asked.gpus_per_node or ranks // asked.nodes
    if tasks * asked.nodes != ranks:
        raise ValueError(
            f"evaluate.job: {ranks} ranks (pp x dp x cp x tp) cannot be {tasks} on each of "
            f"{asked.nodes} nodes: change nodes, gpus_per_node, dp, pp, cp or tp there"
        )
    options = {name: getattr(asked, name) for name in _OPTIONS if getattr(asked, name)}
    options |= {"cpus-per-task": asked.cpus_per_task} if asked.cpus_per_task else {}
    options |= {} if asked.gpus_per_node == 0 else {"gpus-per-node": tasks}
    requests = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in options.items()]
    log = _log(step_folder)
    values = {
        "title": hidden(f"evaluation of {step_folder}"),
        "name": shlex.quote(hidden(f"{job.project}-evaluate-{step_folder.name}")),
        "nodes": asked.nodes,
        "tasks": tasks,
        "requests": "\n".join(requests),
        "log": shlex.quote(log),
        "cwd": _word(str(cwd), job.run),
        "srun": f" --cpus-per-task={asked.cpus_per_task}" if asked.cpus_per_task else "",
        "command": " ".join(_word(word, job.run) for word in evaluate_command(job, step_folder)),
    }
    texts = [str(value) for name, value in values.items() if name != "requests"] + requests
    if odd := [text for text in texts if text and not text.isprintable()]:
        raise ValueError(
            f"{odd[0]!r} has characters that cannot be printed, which would break out of the job's "
            "script: rename it"
        )
    text = TEMPLATE.read_text(encoding="utf-8").replace("{{requests}}\n" * (not requests), "")
    if hidden(log) != log:  # Slurm reads no variables there: sbatch gets the option
        text = text.replace("#SBATCH --output={{log}}\n", "")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), text)
