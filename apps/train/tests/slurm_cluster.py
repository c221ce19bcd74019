"""A Slurm cluster of two nodes that are both this host, on ports and folders of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launchers import environment, marked, until

from kenotron_dist.testing import free_port

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "sinfo")
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# A job that is put back waits until its credential has expired: 120 s, if nothing is said.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=1,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=20
FirstJobId={first}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class NoCluster(Exception):
    """Why there can be none here."""


def why_not() -> str:
    """Why no cluster can be started here; empty when one can."""
    missing = [name for name in NEEDED if shutil.which(name, path=SEARCH) is None]
    if missing:
        return f"Slurm is not installed: no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "Slurm's daemons are started by root only"


@dataclass(frozen=True)
class Cluster:
    """Where a cluster is."""

    folder: Path
    env: dict[str, str]
    """Variables of a shell that uses it."""

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A command of a user."""
        return subprocess.run(
            command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
        )

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        text = self.run("scontrol", "show", "job", number, "-o").stdout
        return dict(re.findall(r"(\w+)=(\S+)", text))

    def logs(self) -> str:
        """The ends of what the daemons have said."""
        return "\n".join(
            f"{file.name}: {file.read_text()[-1500:]}" for file in self.folder.glob("*.log")
        )


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start the daemons, and end all that they have started. Raises NoCluster where nobody can."""
    # Not below pytest's folder, which others may not enter: munge refuses it.
    folder = Path(tempfile.mkdtemp(prefix="kenotron-slurm-"))
    folder.chmod(0o755)
    conf = folder / "slurm.conf"
    # Real clusters resolve the names of their nodes. Here both are this host.
    env = environment(SLURM_CONF=str(conf), MASTER_ADDR="127.0.0.1", PATH=SEARCH)
    own = Cluster(folder, env)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _configure(folder, conf)
        try:
            _bring_up(own, daemons)
        except TimeoutError as error:
            raise NoCluster(f"Slurm's daemons do not come up here: {error}") from None
        yield own
    finally:
        _end(conf)
        for daemon in daemons:
            daemon.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _bring_up(own: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    daemons.append(_start(own, "munged", *_munged(own.folder)))
    until((own.folder / "munge.socket").exists, own.logs, 60)
    daemons.append(_start(own, "slurmctld", "slurmctld", "-D", "-c"))
    daemons += [_start(own, node, "slurmd", "-D", "-N", node) for node in ("n1", "n2")]
    idle = ("sinfo", "--noheader", "--states=idle", "--format=%D")
    until(lambda: own.run(*idle).stdout.strip() == "2", own.logs, 60)


def _configure(folder: Path, conf: Path) -> None:
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(random.randbytes(1024))
    key.chmod(0o400)
    values = {
        "host": socket.gethostname(),
        "user": getpass.getuser(),
        "folder": folder,
        "ports": [free_port() for _ in range(3)],
        "first": random.randrange(1000, 60_000),  # ports of ranks come from it
    }
    conf.write_text(CONF.format(**values))


def _munged(folder: Path) -> list[str]:
    places = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "log-file": "munged.own.log",
        "seed-file": "munged.seed",
    }
    options = [f"--{name}={folder / file}" for name, file in places.items()]
    return ["munged", "--foreground", "--num-threads=1", *options]


def _start(own: Cluster, name: str, *command: str) -> subprocess.Popen[bytes]:
    with (own.folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            command, env=own.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _end(conf: Path) -> None:
    """Kill what has this cluster in its environment: daemons, steps, and what they have started."""
    mark = f"SLURM_CONF={conf}"

    def kill() -> bool:
        found = marked(mark)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    until(kill, lambda: f"these processes of the cluster are left: {marked(mark)}", 30)
