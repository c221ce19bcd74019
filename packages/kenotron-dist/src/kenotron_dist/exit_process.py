"""End of a run's process without the finalisation that gloo's threads do not survive."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

STALLED = 75
"""Exit code of a process that left because of a stall (``EX_TEMPFAIL``: trying again may help)."""


def leave(code: int, last_words: str = "") -> NoReturn:
    """End this process at once, output flushed if it can be, without Python's finalisation.

    ``last_words`` are written to standard error before, if it can be written.

    A gloo process that finalises soon after its last collective aborts in half the cases (torch
    2.13): a backend thread drops a tensor while the interpreter goes away.
    """
    if last_words:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{last_words}\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe: leave anyway
            stream.flush()
    os._exit(code)


def exit_code(error: BaseException | None) -> int:
    """Return the exit code that Python would give; a traceback is written as Python would."""
    if error is None or (isinstance(error, SystemExit) and error.code is None):
        return 0
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, SystemExit):
        sys.stderr.write(f"{error.code}\n")
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return 1
