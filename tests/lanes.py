"""Run pytest on several folders beside each other: while one begins, waits or ends, others compute.

``python tests/lanes.py FILE`` reads ``{name: {"arguments": [...], "environment": {...}}}``. What a
lane prints is shown when it has ended. The status is 1 where a lane failed, or where more tests
than ``BUDGET`` failed beside others and passed alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AT_ONCE = 2
"""Lanes at a time, of some workers each."""
BUDGET = 2
"""Unsteady tests that are put up with: each is a fault to be mended."""
ONCE_MORE = Path(__file__).with_name("once_more.py")
NO_TESTS = 5
"""pytest's status where it found none."""


@dataclass(frozen=True)
class Ended:
    """What became of a lane."""

    name: str
    status: int
    seconds: float
    printed: str

    @property
    def unsteady(self) -> list[str]:
        """Tests that failed beside others and passed alone."""
        lines = re.findall(r"^UNSTEADY: [^:]*: (.*)$", self.printed, re.MULTILINE)
        return [name for line in lines for name in line.split(", ")]

    @property
    def counts(self) -> str:
        """Pytest's last line."""
        found = re.findall(
            r"^=* ?(\d+ (?:passed|failed|skipped|error).* in .*?)=*$", self.printed, re.M
        )
        return found[-1].strip() if found else "no tests"


def run_lane(name: str, lane: dict[str, Any]) -> Ended:
    """Run one and print what it printed."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ONCE_MORE), *lane["arguments"]],
        env=os.environ | lane["environment"], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    status = 0 if done.returncode == NO_TESTS else done.returncode
    ended = Ended(name, status, time.monotonic() - began, done.stdout)
    print(f"{'=' * 30} {name}\n{ended.printed}\n", end="", flush=True)
    return ended


def main(file: Path) -> int:
    """Run all lanes and print a line for each; the status."""
    lanes = json.loads(file.read_text())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(run_lane, lanes, lanes.values()))
    print("=" * 30, "lanes")
    for each in ended:
        print(f"{each.name}: status {each.status}, {each.seconds:.0f} s, {each.counts}")
    unsteady = [name for each in ended for name in each.unsteady]
    if unsteady:
        print(f"{len(unsteady)} unsteady, {BUDGET} are put up with: {', '.join(unsteady)}")
    return int(any(each.status for each in ended) or len(unsteady) > BUDGET)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
