"""``python apps/train kubernetes``: the manifest of a training that is moved and resumes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kenotron_command import add_config_flags, framed
from kenotron_config import DEFAULT_CONFIG, dump_config
from kenotron_train.called import parser_of
from kenotron_train.config_file import load_config
from kenotron_train.kubernetes.manifest import KubernetesJob, manifest_of
from kenotron_train.log.printing import fail, say
from kenotron_train.node_placement import placement_warning, ranks_of_job, ranks_per_node
from kenotron_train.slurm.cli import check_credentials, count, whole


def kubernetes_main(argv: Sequence[str]) -> int:
    """Print the manifest of a job; the exit status."""
    given = vars(kubernetes_parser().parse_args(argv))
    return framed(lambda: _show(given), OSError, ValueError, report=fail)


def _show(given: dict[str, Any]) -> int:
    ranks = ranks_of_job(given["nodes"], given["gpus_per_node"])
    file = given.pop("config_file") or DEFAULT_CONFIG
    config = load_config(file, given.pop("set"), ranks)
    check_credentials(asdict(config))
    job = KubernetesJob(name=given.pop("job_name") or config.general.project, **given)
    sizes, folder = config.parallelism, str(config.checkpoints.checkpoints_path)
    manifest = manifest_of(job, sizes, folder, dump_config(config))
    ranks = ranks_per_node(job.nodes, job.gpus_per_node, sizes)
    if warning := placement_warning(ranks, sizes.tp):
        print(warning, file=sys.stderr)
    say(manifest.removesuffix("\n"))
    return 0


def kubernetes_parser() -> argparse.ArgumentParser:
    """Return the flags of `kubernetes`."""
    parser = parser_of(
        "kubernetes",
        "Print the manifest of a training as a job of Kubernetes, one pod a node and "
        "one process a GPU, for `kubectl apply -f -`. When a pod has to leave its node, the ranks "
        "save, and the job starts again and resumes.",
    )
    add, kinds = parser.add_argument, ("jobset", "trainjob")
    add("--nodes", type=count, required=True, metavar="N", help="nodes that train together")
    add_config_flags(parser)
    what = "a JobSet (default), or a TrainJob of Kubeflow Trainer with its TrainingRuntime"
    add("--kind", choices=kinds, default=kinds[0], help=what)
    what = "GPUs of a node, one process each; 0: train on CPUs (default: what the sizes need)"
    add("--gpus-per-node", type=whole, metavar="N", help=what)
    what = "time to save when a pod has to leave its node (default: 300)"
    add("--grace", type=count, default=KubernetesJob.grace, metavar="SECONDS", help=what)
    what = "new starts after failures, of ranks or nodes that were lost (default: 2)"
    add("--retries", type=whole, default=KubernetesJob.retries, metavar="N", help=what)
    add("--stall-limit", type=count, metavar="SECONDS", help="as for a training (default: 300)")
    _add_flags_of_cluster(parser)
    return parser


def _add_flags_of_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name what the cluster has."""
    add = parser.add_argument
    add("--image", required=True, help="image that has the program: .containers/Dockerfile")
    what = "command in the image that trains (default: kenotron-train): 'python mine.py'"
    add("--program", default=KubernetesJob.program, metavar="COMMAND", help=what)
    what = "PersistentVolumeClaim that all nodes can write to, for checkpoints and data"
    add("--claim", required=True, metavar="NAME", help=what)
    what = "where the claim is mounted; ranks start there (default: /data)"
    add("--mount-path", dest="mount", default=KubernetesJob.mount, metavar="PATH", help=what)
    what = (
        "Secret whose keys become environment variables: KENOTRON_JOB_SECRET, and what !env names"
    )
    add("--secret", metavar="NAME", help=what)
    add("--cpus", metavar="QUANTITY", help="CPUs of each node")
    add("--memory", metavar="QUANTITY", help="memory of each node, for example 512Gi")
    add("--job-name", metavar="NAME", help="default: general.project")
    add("--namespace", metavar="NAME", help="default: that of kubectl")
