"""A reader that has seen enough, ``head`` say, changes no exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import runs

VERIFY = ("verify", "--steps", "1")


@pytest.mark.parametrize("words", [("config-reference",), VERIFY], ids=lambda words: words[0])
def test_nobody_reads(words: tuple[str, ...], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(runs.APP), *words]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == 0 and not done.stderr
