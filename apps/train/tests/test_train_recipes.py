"""Recipes of the document about launching that need other machines, run on this one."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import launchers
import runs
import yaml

TEXT = (runs.APP / "docs/launching.md").read_text()
SSH = """#!/bin/bash
# ssh -tt HOST COMMAND, here
echo "$1 $2" >> hosts
exec bash -c "$3"
"""


def fence(language: str, mark: str) -> str:
    """The block of the document that has this text."""
    found = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    (text,) = (each for each in found if mark in each)
    return text


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def flags_of(folder: Path) -> str:
    """The flags of a tiny run on two ranks, as text."""
    return " ".join(launchers.flags(folder, parallelism__dp=2, **launchers.SHORT))


def replaced(text: str, changes: dict[str, str]) -> str:
    """A text with all of these parts changed, each of which it must have."""
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def test_the_task_of_skypilot_trains(tmp_path: Path) -> None:
    task = yaml.safe_load(fence("yaml", "num_nodes:"))
    assert task["num_nodes"] == 4 and task["resources"]["accelerators"] == "H100:8"
    changes = {"--config-file ~/c.yaml": flags_of(tmp_path), "cd /data": f"cd {tmp_path}"}
    changes |= {"29400": free_port(), "kenotron-train": f"{sys.executable} {runs.APP}"}
    nodes = [
        subprocess.Popen(
            ["bash", "-c", replaced(task["run"], changes)],
            env=launchers.environment(
                SKYPILOT_NUM_NODES="2", SKYPILOT_NUM_GPUS_PER_NODE="1",
                SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NODE_IPS="127.0.0.1\n127.0.0.2",
                KENOTRON_JOB_SECRET="0123456789abcdef" * 4,
            ),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert [step for step, *_ in launchers.losses(tmp_path)] == [1, 2, 3]


def test_the_loop_over_ssh_trains(tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    changes = {
        "cd /shared/kenotron && . .venv/bin/activate && ": "",
        "--nproc-per-node 8": "--nproc-per-node 1",
        "--master-addr hosta": "--master-addr localhost",
        "29400": free_port(),
        "--config-file /shared/c.yaml": flags_of(tmp_path),
        "apps/train ": f"{runs.APP} ",
    }
    loop = replaced(fence("bash cluster", "ssh -tt"), changes)
    done = subprocess.run(
        ["bash", "-c", f'PATH="$PWD:$PATH"\n{loop}'],
        cwd=tmp_path, env=launchers.environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    logs = [(tmp_path / f"{host}.log").read_text() for host in ("hosta", "hostb")]
    assert done.returncode == 0 and not done.stderr, logs
    assert sorted((tmp_path / "hosts").read_text().splitlines()) == ["-tt hosta", "-tt hostb"]
    assert [step for step, *_ in launchers.losses(tmp_path)] == [1, 2, 3], logs
