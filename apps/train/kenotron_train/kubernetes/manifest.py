"""A training as a job of Kubernetes: its manifest, a JobSet or a TrainJob of Kubeflow Trainer."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from textwrap import indent
from typing import Literal

from kenotron_config import ParallelismConfig
from kenotron_train.node_placement import ranks_on_nodes, ranks_per_node

SPEC = Path(__file__).with_name("jobset_spec.yaml")
SCRIPT = Path(__file__).with_name("start_ranks.sh")
FOLDER = "/etc/kenotron"
"""Folder of config and script in a container."""
_LONGEST = 63
"""Characters of a host name."""

CONFIG_MAP = """\
# {title}
# Written by `python apps/train kubernetes`.
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}-config{namespace}
data:
  config.yaml: |
{config}
  start_ranks.sh: |
{script}
"""
JOB_SET = """\
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}{namespace}
spec:
{spec}
"""
TRAIN_JOB = """\
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: {name}{namespace}
spec:
  mlPolicy:
    numNodes: {nodes}
    torch: {{}}
  template:
    spec:
{spec}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {name}{namespace}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: {name}
  trainer:
    numNodes: {nodes}
    numProcPerNode: {ranks}
"""


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """Request of a job to Kubernetes."""

    kind: Literal["jobset", "trainjob"] = "jobset"
    """What is made: a JobSet, or a TrainJob with its TrainingRuntime."""
    name: str
    """Name of the job."""
    namespace: str | None = None
    """Namespace; None: that of the command which applies the manifest."""
    nodes: int
    """Nodes that train together, one pod each."""
    gpus_per_node: int | None = None
    """GPUs of each node, one a rank; 0: none, on CPUs; None: as many as there are ranks."""
    image: str
    """Image that has the program."""
    claim: str
    """PersistentVolumeClaim that all nodes can write to (ReadWriteMany)."""
    mount: str = "/data"
    """Path of the claim in the container: the folder that ranks start in."""
    secret: str | None = None
    """Secret whose keys become environment variables, KENOTRON_JOB_SECRET among them."""
    cpus: str | None = None
    """CPUs of each node, as a quantity of Kubernetes; None: no limit."""
    memory: str | None = None
    """Memory of each node, as a quantity of Kubernetes; None: no limit."""
    grace: int = 300
    """Seconds that ranks may take to save when the pod has to leave its node."""
    retries: int = 2
    """Number of new starts after failures."""
    program: str = "kenotron-train"
    """Command in the image that trains."""
    stall_limit: int | None = None
    """Seconds that a rank may let others wait; None: the training's default."""

    def check(self, checkpoints: str) -> None:
        """Raise ValueError for what Kubernetes would refuse, or what could not resume.

        Args:
            checkpoints: the config's `checkpoints.checkpoints_path`.
        """
        # Names of pods are this name and an ending: the ending of the last pod limits it.
        room = _LONGEST - len(f"-node-0-{self.nodes - 1}-12345")
        for flag, name in (("--job-name", self.name), ("--namespace", self.namespace or "x")):
            if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > room:
                raise ValueError(
                    f"{flag} {name!r}: host names are made of it, so give a letter, then letters, "
                    f"digits and -, all lower case, {room} characters at most"
                )
        try:
            words = shlex.split(self.program)
        except ValueError as error:
            raise ValueError(f"--program {self.program}: {error}: quote it as in a shell") from None
        if not words or not self.program.isprintable():
            raise ValueError(f"--program {self.program!r}: give a command on one line")
        mount = PurePosixPath(self.mount)
        if not mount.is_absolute() or ".." in mount.parts or mount == PurePosixPath("/"):
            raise ValueError(f"--mount-path {self.mount}: give an absolute path, such as /data")
        if not (mount / checkpoints).is_relative_to(mount) or ".." in Path(checkpoints).parts:
            raise ValueError(
                f"checkpoints.checkpoints_path: {checkpoints} is not in {mount}, where the claim "
                f"{self.claim} is mounted, and what is not is lost with its pod: "
                f"--set checkpoints.checkpoints_path={mount / 'checkpoints'}, or another "
                "--mount-path"
            )


def manifest_of(job: KubernetesJob, sizes: ParallelismConfig, checkpoints: str, config: str) -> str:
    """Return the manifest for `kubectl apply`.

    Args:
        job: what is asked for.
        sizes: of its mesh.
        checkpoints: the config's `checkpoints.checkpoints_path`.
        config: the text of the config.

    Raises:
        ValueError: see `KubernetesJob.check` and `ranks_per_node`.
    """
    job.check(checkpoints)
    ranks = ranks_per_node(job.nodes, job.gpus_per_node, sizes)
    spec = _spec(job, ranks, sizes.world_size)
    template, depth = (JOB_SET, 2) if job.kind == "jobset" else (TRAIN_JOB, 6)
    return (CONFIG_MAP + template).format(
        title=f"{ranks_on_nodes(sizes.world_size, job.nodes)}: {sizes.described}",
        name=job.name,
        namespace=f"\n  namespace: {job.namespace}" if job.namespace else "",
        config=_text(config),
        script=_text(_script(job)),
        nodes=job.nodes,
        ranks=ranks,
        spec=indent(spec, " " * depth).rstrip("\n"),
    )


def _spec(job: KubernetesJob, ranks: int, world: int) -> str:
    """Return the spec of a JobSet, which a TrainingRuntime has, too."""
    gpus = ranks if job.gpus_per_node is None else job.gpus_per_node
    limits = {"cpu": job.cpus, "memory": job.memory, "nvidia.com/gpu": str(gpus or "") or None}
    given = {name: value for name, value in limits.items() if value}
    values = {
        "retries": job.retries,
        "nodes": job.nodes,
        "grace": job.grace,
        "image": json.dumps(job.image),
        "folder": FOLDER,
        "mount": json.dumps(job.mount),
        # The first pod, at which the ranks of all pods meet.
        "address": f"{job.name}-node-0-0.{job.name}",
        "world": world,
        "ranks": ranks,
        "secret": _list("envFrom", [{"secretRef": {"name": job.secret}}] if job.secret else []),
        "resources": _list("resources", {"limits": given} if given else {}),
        "claim": json.dumps(job.claim),
        "name": job.name,
    }
    return re.sub(r"^\n", "", _filled(SPEC, values), flags=re.MULTILINE)


def _script(job: KubernetesJob) -> str:
    """Return the script that starts the ranks of a pod."""
    values = {
        "program": " ".join(map(shlex.quote, shlex.split(job.program))),
        "config": f"{FOLDER}/config.yaml",
        "flags": f" --stall-limit {job.stall_limit}" if job.stall_limit else "",
    }
    return _filled(SCRIPT, values)


def _text(text: str) -> str:
    """Return the lines of a value of a ConfigMap."""
    return indent(text.rstrip("\n"), " " * 4)


def _list(key: str, value: object) -> str:
    """Return a line of a container; empty where there is no value. JSON is YAML."""
    return f"{' ' * 16}{key}: {json.dumps(value)}" if value else ""


def _filled(template: Path, values: Mapping[str, object]) -> str:
    """Return the text of a template with its values."""
    text = template.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), text)
