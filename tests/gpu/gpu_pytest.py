"""The repository's test files for GPUs as items of the part ``ranks``."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_items import Item, NotRunError, Result, Setting, check
from gpu_runner import last_lines

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "packages/kenotron-dist/tests/test_dist_nccl.py",
    "packages/kenotron-pp/tests/test_pp_nccl.py",
    "packages/kenotron-pp/tests/test_pp_nccl_order.py",
    "packages/kenotron-tp/tests/test_tp_nccl.py",
    "packages/kenotron-ckpt/tests/test_ckpt_cuda.py",
    "packages/kenotron-cp/tests/test_cp_cuda.py",
    "packages/kenotron-ep/tests/test_ep_cuda.py",
    "tests/test_cuda.py",
]
"""Test files for GPUs."""
SETTINGS = Path(__file__).with_name("gpu_pytest.ini")
"""In place of the repository's, which are for the versions of CI: others may be older, or warn."""


def pytest_command(path: str) -> list[str]:
    """Return the command that runs a test file with any pytest, from the root."""
    options = ["-c", str(SETTINGS), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", "-v", "--tb=short", *options, path]


def told(command: list[str]) -> tuple[int, str]:
    """Return exit status and output of a program, which is printed meanwhile.

    After a timeout the last lines that were printed are in the record: the test that hangs.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    lines = []
    with subprocess.Popen(command, **options) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def pytest_item(path: str) -> Item:
    """Make the item that runs one test file; its failures are those of the item."""

    def run(setting: Setting) -> Iterator[Result]:
        if path == "tests/test_cuda.py" and importlib.util.find_spec("pydantic") is None:
            raise NotRunError("pydantic cannot be imported here, and apps/train needs it")
        status, text = told(pytest_command(path))
        counts = re.findall(r"(\d+) (passed|failed|errors?|skipped)", last_lines(text, 1))
        yield {word: int(number) for number, word in counts}
        errors = "\n".join(line for line in text.splitlines() if line.startswith("E  "))
        check(status == 0, f"{last_lines(errors, 30)}\n{last_lines(text)}")

    reason = "without one its tests are skipped"
    return Item(Path(path).name, 120.0, run, ("pytest", "hypothesis"), reason)
