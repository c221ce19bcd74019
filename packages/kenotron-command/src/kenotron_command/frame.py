"""The frame of every program: its exit statuses, and an error as a line on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

OK = 0
"""Exit status of what is done; the README has all statuses."""
FAILED = 1
"""Exit status of an error, and of a comparison that found a difference."""
BAD_INPUT = 2
"""Exit status of wrong flags, and of a comparison that was not made."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def printable(text: str) -> str:
    """Replace control characters, which a terminal would obey, by U+FFFD; keep tabs and lines."""
    kept = ("\n", "\t")
    return "".join(c if c.isprintable() or c in kept else "\N{REPLACEMENT CHARACTER}" for c in text)


def fail(text: str, status: int = FAILED) -> int:
    """Print an error on standard error, where there is a text. Returns the exit status."""
    if text:
        with suppress(OSError):  # it is not read: the status is enough
            print(f"error: {printable(text)}", file=sys.stderr, flush=True)
    return status


def framed(
    work: Callable[[], int],
    *known: type[Exception],
    status: int = FAILED,
    explain: Callable[[Exception], tuple[str, int] | None] | None = None,
    report: Callable[[str, int], int] = fail,
) -> int:
    """Do the work of a program; an error that its user can mend is a line, not a traceback.

    Args:
        work: returns the exit status.
        known: errors whose message is enough.
        status: exit status after one of them.
        explain: message and exit status of an error, or None; instead of ``known``.
        report: prints the message and returns the exit status.

    Raises:
        Exception: an error that is not known.
    """
    try:
        return work()
    except KeyboardInterrupt:
        return report("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        if explain is not None:
            told = explain(error)
        else:
            told = (str(error), status) if isinstance(error, known) else None
        if told is None:
            raise
        return report(*told)
