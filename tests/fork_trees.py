"""Compute steps of copies of the tree, each in a fork of one process that has torch loaded.

``mutants_bits.py`` starts it. It reads one request a line: ``tree`` (the copy), ``limit`` (seconds)
and what ``bits_cases.answer`` is given; it writes a line when the fork has ended. No module of the
tree is loaded before the fork, so each one computes with its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # another bug may be in a file of the same second and size
LOADED = ("torch._dynamo", "torch.distributed", "numpy", "yaml")


def serve() -> None:
    """Answer requests until the input ends."""
    for name in LOADED:
        __import__(name)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _compute(request)
        _wait(pid, request["limit"])
        print("done", flush=True)


def paths(tree: Path) -> list[str]:
    """Folders of a tree from which its modules are imported."""
    folders = [tree / "tests", *sorted(tree.glob("packages/*/src")), *sorted(tree.glob("apps/*/"))]
    return [str(folder) for folder in folders]


def _compute(request: dict[str, Any]) -> None:
    """Write what came of a request, or the error, into its file; ends this process."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(quiet, number)
    sys.path[:0] = paths(Path(request.pop("tree")))
    out, _ = Path(request.pop("out")), request.pop("limit")
    try:
        import bits_cases

        bits_cases.answer(out, **request)
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        out.write_text(json.dumps([{"case": "", "error": said}]))
    finally:
        os._exit(0)


def _wait(pid: int, limit: float) -> None:
    """Wait for a fork; after the limit it is ended, and its ranks with it."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    serve()
