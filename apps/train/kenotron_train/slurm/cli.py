"""``python apps/train slurm``: a training as a job that ends in time, saves, and resumes."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kenotron_command import add_config_flags, framed
from kenotron_config import DEFAULT_CONFIG, credentials, dump_config, masked
from kenotron_train.called import parser_of
from kenotron_train.config_file import load_config
from kenotron_train.log.printing import fail, say
from kenotron_train.node_placement import placement_warning, ranks_of_job, ranks_on_nodes
from kenotron_train.slurm.job import SlurmJob, script_of
from kenotron_train.slurm.provenance import packages, provenance

_OPTIONS = {
    "partition": "where the job runs",
    "account": "who pays for it",
    "qos": "quality of service",
    "mem": "memory of each node, for example 64G",
}


def slurm_main(argv: Sequence[str]) -> int:
    """Write the script of a job and submit it, or show it; the exit status."""
    given = slurm_parser().parse_args(argv)
    return framed(lambda: _submit(given, argv), OSError, ValueError, report=fail)


def _submit(given: argparse.Namespace, argv: Sequence[str]) -> int:
    ranks = ranks_of_job(given.nodes, given.gpus_per_node)
    config = load_config(given.config_file or DEFAULT_CONFIG, given.set, ranks)
    check_credentials(asdict(config))
    job, cwd = _job(given, config.general.project), Path.cwd()
    sizes = config.parallelism
    folder = _new_folder(Path(config.checkpoints.checkpoints_path).absolute())
    script = script_of(job, sizes, folder, [sys.executable, _program()], cwd)
    if warning := placement_warning(job.ranks_per_node(sizes), sizes.tp):
        print(warning, file=sys.stderr)
    if given.dry_run:
        say(script.removesuffix("\n"))
        return 0
    words = [sys.executable, _program(), "slurm", *map(masked, argv)]
    number = submit(script, dump_config(config), folder, words, cwd)
    places = ranks_on_nodes(sizes.world_size, job.nodes)
    say(f"Submitted job {number}: {places}\nScript, config and log: {folder}")
    return 0


def check_credentials(keys: dict[str, Any]) -> None:
    """Refuse a config whose file for the job would lack what is masked in it."""
    if found := credentials(keys):
        raise ValueError(
            f"{', '.join(found)}: a URL with credentials was given, which the files of the job "
            "must not keep: write !env NAME in the config, and set NAME where you submit"
        )


def submit(script: str, config: str, folder: Path, command: list[str], cwd: Path) -> str:
    """Fill the folder of a job and give its script to sbatch; the number of the job.

    ``config`` is the text of its config.

    Nothing is left of the folder when Slurm refuses the job. Raises ValueError with its reason, and
    where there is no Slurm.
    """
    if shutil.which("sbatch") is None:
        raise ValueError(
            "sbatch is not there: submit on a machine that has Slurm's commands in its PATH, or "
            "see the script with --dry-run"
        )
    folder.mkdir(parents=True)
    try:
        origin = provenance(command, cwd)
        (folder / "config.yaml").write_text(config, encoding="utf-8")
        (folder / "packages.txt").write_text(packages(), encoding="utf-8")
        (folder / "job.sbatch").write_text(script, encoding="utf-8")
        (folder / "launch.json").write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        words = ["sbatch", "--parsable", str(folder / "job.sbatch")]
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip().removeprefix("sbatch: error: ")
            raise ValueError(
                f"sbatch refused the job ({why}): correct the options, nothing is left"
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    number = done.stdout.strip().partition(";")[0]  # a cluster's name may follow
    (folder / f"job-{number}").touch()
    return number


def _job(given: argparse.Namespace, project: str) -> SlurmJob:
    options = [(name, getattr(given, name)) for name in _OPTIONS if getattr(given, name)]
    for text in given.sbatch:
        name, _, value = text.lstrip("-").partition("=")
        options.append((name, value))
    return SlurmJob(
        nodes=given.nodes,
        gpus_per_node=given.gpus_per_node,
        name=given.job_name or project,
        options=tuple(options),
        cpus_per_task=given.cpus_per_task,
        time=given.time,
        stop_before=given.stop_before,
        retries=given.retries,
        stall_limit=given.stall_limit,
    )


def _new_folder(run: Path) -> Path:
    """A folder of the run that is not there yet."""
    name = time.strftime("%Y%m%d-%H%M%S")
    names = [name, *(f"{name}-{n}" for n in range(2, 100))]
    return next(run / "slurm" / each for each in names if not (run / "slurm" / each).exists())


def _program() -> str:
    """The program that was started: the app, or one that calls ``main`` with data of its own."""
    return str(Path(sys.argv[0]).absolute())


def count(text: str, least: int = 1) -> int:
    """Read a whole number of at least `least`."""
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value


def whole(text: str) -> int:
    """Read a whole number of at least 0."""
    return count(text, least=0)


def slurm_parser() -> argparse.ArgumentParser:
    """The flags of ``slurm``."""
    parser = parser_of(
        "slurm",
        "Submit a training to Slurm, one task a GPU. Before its time is over it saves, "
        "goes back into the queue and resumes. Script, resolved config, versions and log are kept "
        "in a folder below checkpoints_path.",
    )
    add = parser.add_argument
    add("--nodes", type=count, required=True, metavar="N", help="nodes that train together")
    add_config_flags(parser)
    add(
        "--gpus-per-node",
        type=whole,
        metavar="N",
        help="GPUs of a node, one process each; 0: train on CPUs (default: what the config's sizes "
        "need)",
    )
    add("--cpus-per-task", type=count, metavar="N", help="CPUs of each process")
    for name, what in _OPTIONS.items():
        add(f"--{name}", help=what)
    add("--time", metavar="TIME", help="time limit in Slurm's formats: 90 (minutes), 12:00:00, 2-0")
    add("--job-name", metavar="NAME", help="default: general.project")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="any other option of sbatch: constraint=h100",
    )
    add(
        "--stop-before",
        type=count,
        default=300,
        metavar="SECONDS",
        help="save and stop so long before the end of the time (default: 300)",
    )
    add(
        "--retries",
        type=whole,
        default=2,
        metavar="N",
        help="new starts after failures in a row, of ranks or nodes that were lost (default: 2)",
    )
    add("--stall-limit", type=count, metavar="SECONDS", help="as for a training (default: 300)")
    add("--dry-run", action="store_true", help="show the script; write and submit nothing")
    return parser
