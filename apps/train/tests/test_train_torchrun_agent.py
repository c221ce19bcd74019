"""The agent of torchrun: when its host may leave."""

import subprocess
import sys

import pytest

from kenotron_dist.testing import free_port
from kenotron_train.run import torchrun_agent
from kenotron_train.run.torchrun_agent import why_host_stays

AGENT = """
import socket, sys, time
server = socket.socket()
if sys.argv[1] == "serves":
    server.bind(("127.0.0.1", int(sys.argv[2])))
    server.listen()
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHED = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "a-run",
    "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "role", "more", "why"),
    [
        ("1:2", "waits", {}, ""),
        ("2:4", "waits", {}, "torchrun --nnodes 2:4 needs 2 hosts, and there are 2"),
        ("1:2", "serves", {}, "its torchrun serves the rendezvous of all hosts at 127.0.0.1:"),
        ("1:2", "waits", {"TORCHELASTIC_RESTART_COUNT": "3"}, "--max-restarts 3 has no restart"),
        ("1:2", "waits", {"TORCHELASTIC_RUN_ID": None}, "the launcher decides which hosts"),
        (None, "waits", {}, "the command line of torchrun cannot be read"),
    ],
)
def test_a_host_leaves_only_where_the_others_can_continue(nodes, role, more, why, monkeypatch):
    port = free_port()
    given = [] if nodes is None else ["torch.distributed.run", "--nnodes", nodes]
    words = [*given, "--rdzv-endpoint", f"127.0.0.1:{port}", "script.py", "--flag"]
    command = [sys.executable, "-c", AGENT, role, str(port), *words]
    for name, value in (LAUNCHED | more).items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout.readline() == b"ready\n"
            monkeypatch.setattr(torchrun_agent.os, "getppid", lambda: agent.pid)
            found = why_host_stays()
        finally:
            agent.kill()
    assert why in found and bool(found) == bool(why)
