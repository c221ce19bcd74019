"""The program of the README that trains more than a process can hold."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("larger_than_memory.py")


def test_four_processes_train_what_none_can_hold() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        f"rank {rank}" for rank in range(4)
    ]
