"""The agent of torchrun that started this process: whether its host may leave, and its end.

A SIGTERM ends an agent and its workers, and leaves the rendezvous open: the agents of other hosts
start their workers again without it, when it has sent no heartbeat for some time (15 s).
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from kenotron_dist import resolve
from kenotron_dist.launch import torchrun_arguments

_RESTARTS = "MAX_RESTARTS", "RESTART_COUNT"
_LISTENS = "0A"
"""State of a socket in ``/proc/net/tcp``."""


def why_host_stays() -> str:
    """Return why torchrun could not continue without the host of this process; empty: it could.

    Found from the agent's command line and environment, by torch's own parser.
    """
    if resolve(os.environ).launcher != "torchrun" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return "the launcher decides which hosts there are; start without this one"
    agent = os.getppid()
    try:
        words = Path(f"/proc/{agent}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
        given = torchrun_arguments(words)
    except (OSError, ValueError) as error:
        return f"the command line of torchrun cannot be read ({error})"
    hosts, fewest = int(os.environ.get("GROUP_WORLD_SIZE", "1")), int(given["nnodes"].split(":")[0])
    if hosts - 1 < fewest:
        return f"torchrun --nnodes {given['nnodes']} needs {fewest} hosts, and there are {hosts}"
    most, count = (os.environ.get(f"TORCHELASTIC_{name}") for name in _RESTARTS)
    if int(count or 0) >= int(most or 0):
        return f"torchrun --max-restarts {most} has no restart left"
    if _listens(agent, given["rdzv_endpoint"]):
        return f"its torchrun serves the rendezvous of all hosts at {given['rdzv_endpoint']}"
    return ""


def end_agent() -> None:
    """Send SIGTERM to the agent, which ends with status 1: see ``why_host_stays``."""
    os.kill(os.getppid(), signal.SIGTERM)


def _listens(process: int, endpoint: str) -> bool:
    """Return whether a process of this host listens at the port of an endpoint.

    True where that cannot be found out.
    """
    port = endpoint.rpartition(":")[2]
    if not port.isdecimal():
        port = "29400"
    found = set()
    try:
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == _LISTENS and int(parts[1].rpartition(":")[2], 16) == int(port):
                    found.add(f"socket:[{parts[9]}]")
        handles = list(Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return True
    return any(_target(handle) in found for handle in handles)


def _target(handle: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(handle)
    return ""
