"""Run pytest; a few tests that fail are run once more, alone, and named.

Many tests start, stop and kill processes within seconds, while others keep every core busy. One
that fails then and passes alone is unsteady: a fault to be mended, and no reason to refuse a
change. More than a few that fail, or one that fails alone, too, end with pytest's status.

``python tests/once_more.py ARGUMENTS`` takes the arguments of pytest.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MOST = 3
"""Tests that are run once more."""
SOME_FAILED = 1
"""pytest's status where all tests ran and some failed."""
WITH_OTHERS = ("-n", "--dist", "--max-worker-restart")
"""Options of pytest-xdist."""


def failed_tests(cache: Path) -> list[str]:
    """Names of the tests that failed, as pytest left them; without the group's name of xdist."""
    found = cache / "v/cache/lastfailed"
    names = json.loads(found.read_text()) if found.exists() else {}
    return [re.sub(r"@\w+$", "", name) for name in names]


def alone(arguments: list[str], names: list[str]) -> list[str]:
    """Arguments for these tests in one process: the options that were given, and no other test."""
    kept, rest = [], iter(arguments)
    for each in rest:
        if each in ("-k", "-m", "-n", "--dist"):
            next(rest)
        elif each == "-p":
            kept += [each, next(rest)]
        elif each.startswith("-") and not each.startswith(WITH_OTHERS):
            kept.append(each)
    return [*kept, *names]


def main(arguments: list[str]) -> int:
    """Run the tests, and what failed of them once more; the status of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        pytest = [sys.executable, "-m", "pytest", "-o", f"cache_dir={folder}"]
        status = subprocess.run([*pytest, *arguments]).returncode
        names = failed_tests(Path(folder))
        if status != SOME_FAILED or not 0 < len(names) <= MOST:
            return status
        print(f"\nonce more, alone: {', '.join(names)}", flush=True)
        status = subprocess.run([*pytest, *alone(arguments, names)]).returncode
    if status == 0:
        print(f"UNSTEADY: failed beside other tests, passed alone: {', '.join(names)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
