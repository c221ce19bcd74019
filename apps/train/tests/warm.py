"""A process that runs programs one after another, so that torch is loaded once for all of them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

Done = subprocess.CompletedProcess[str]
STARTS = 120.0
"""Seconds that a worker may take to start."""


class Worker:
    """One such process. It and the ranks of its programs print into two files of ``folder``."""

    def __init__(self, folder: Path, **env: str) -> None:
        self._ready = False
        self._files = [(folder / name).open("a+") for name in ("stdout", "stderr")]
        reply, theirs = os.pipe()
        script = Path(__file__).with_name("warm_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(theirs)],
            stdin=subprocess.PIPE, stdout=self._files[0], stderr=self._files[1], text=True,
            cwd=folder, pass_fds=(theirs,), env=os.environ | env,
        )  # fmt: skip
        os.close(theirs)
        self._replies = os.fdopen(reply)

    def run(self, folder: Path, program: str, arguments: list[str], timeout: float = 120) -> Done:
        """What ``python <program> <arguments>`` does in ``folder``; like ``subprocess.run``."""
        command = [program, *arguments]
        if not self._ready:
            self._reply(command, STARTS)
            self._ready = True
        for file in self._files:
            file.truncate(0)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), program, arguments]) + "\n")
        self._process.stdin.flush()
        status = self._reply(command, timeout)
        for file in self._files:
            file.seek(0)
        printed = [file.read() for file in self._files]
        return subprocess.CompletedProcess(command, status, *printed)

    def is_alive(self) -> bool:
        """Whether it can run one more."""
        return self._process.poll() is None

    def _reply(self, command: list[str], timeout: float) -> int:
        if not select.select([self._replies], [], [], timeout)[0]:
            self._process.kill()
            self._process.wait()
            raise subprocess.TimeoutExpired(command, timeout)
        return json.loads(self._replies.readline() or "99")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for file in (self._replies, *self._files):
            file.close()


_usual: dict[str, str] = {}
_workers: list[Worker] = []


def remember() -> None:
    """Keep the environment that tests find when they begin: that of the shared worker."""
    _usual.update(_environment())


def restore() -> None:
    """Undo what tests have left in the environment: programs that they call set variables."""
    for name in _environment().keys() - _usual.keys():
        del os.environ[name]
    os.environ.update(_usual)


def shared() -> Worker | None:
    """The one of this process of pytest; None for a test that has changed the environment."""
    if _environment() != _usual:
        return None
    if not _workers or not _workers[-1].is_alive():
        folder = TemporaryDirectory(prefix="kenotron-warm-")
        _workers.append(Worker(Path(folder.name)))
        atexit.register(folder.cleanup)
        atexit.register(_workers[-1].close)
    return _workers[-1]


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
