"""A process that runs programs one after another, so that torch is loaded once for all of them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

Done = subprocess.CompletedProcess[str]


class Worker:
    """One such process. It and the ranks of its programs print into two files of ``folder``."""

    def __init__(self, folder: Path, **env: str) -> None:
        self._env = _environment() | env
        self._files = [(folder / name).open("a+") for name in ("stdout", "stderr")]
        reply, theirs = os.pipe()
        script = Path(__file__).with_name("warm_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(theirs)],
            stdin=subprocess.PIPE, stdout=self._files[0], stderr=self._files[1], text=True,
            cwd=folder, pass_fds=(theirs,), env=self._env,
        )  # fmt: skip
        os.close(theirs)
        self._replies = os.fdopen(reply)

    def fits(self) -> bool:
        """Whether a process that was started now would have the same environment."""
        return self._env == _environment() and self._process.poll() is None

    def run(self, folder: Path, program: str, arguments: list[str], timeout: float = 120) -> Done:
        """What ``python <program> <arguments>`` does in ``folder``; like ``subprocess.run``."""
        for file in self._files:
            file.truncate(0)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), program, arguments]) + "\n")
        self._process.stdin.flush()
        command = [program, *arguments]
        if not select.select([self._replies], [], [], timeout)[0]:
            self._process.kill()
            raise subprocess.TimeoutExpired(command, timeout)
        status = self._replies.readline()
        for file in self._files:
            file.seek(0)
        printed = [file.read() for file in self._files]
        return subprocess.CompletedProcess(command, json.loads(status or "99"), *printed)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        for file in (self._replies, *self._files):
            file.close()


@functools.cache
def shared() -> Worker:
    """The one of this process of pytest."""
    folder = TemporaryDirectory(prefix="kenotron-warm-")
    worker = Worker(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(worker.close)
    return worker


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
