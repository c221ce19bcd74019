"""Printing for a reader who may stop reading: ``python apps/train ... | head``."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from rich.console import Console

from kenotron_command import FAILED
from kenotron_command import fail as command_fail
from kenotron_config import Mask, masked
from kenotron_dist import first_to_say
from kenotron_dist.launch import launcher

_NO_MASK = Mask()


def say(text: str) -> None:
    """Print a line, or several; a reader that has seen enough changes no exit status.

    Credentials in URLs are masked.
    """
    try:
        print(masked(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(text: str) -> None:
    """Print on standard error, once, what is known before there are ranks or after them."""
    if first_to_say(text):
        with contextlib.suppress(OSError):
            print(f"warning: {text}", file=sys.stderr, flush=True)


def on_screen() -> bool:
    """Return whether standard output is a terminal in the foreground.

    Open MPI gives each rank a terminal of its own and copies what is written there: into a file
    too, so colours and cursor movements would be in it.
    """
    return sys.stdout.isatty() and launcher() != "mpi"


def fail(text: str, status: int = FAILED, mask: Mask = _NO_MASK) -> int:
    """Report an error on one of the ranks that have it. Returns the exit status."""
    with contextlib.suppress(OSError, ValueError):
        if on_screen():
            Console().show_cursor()  # a rank that died may have left its progress bar unfinished
    return command_fail(mask.line(text) if first_to_say(text) else "", status)


class StandardOutput:
    """Prints for a program that must continue when a pipe is closed or a disk is full.

    Args:
        elsewhere: what the complaint on standard error says of the place that has all of it.
    """

    def __init__(self, elsewhere: str) -> None:
        self._elsewhere, self._has_failed = elsewhere, False

    def show(self, write: Callable[[], object]) -> None:
        """Call what writes; the first OSError is a line on standard error, later ones nothing."""
        try:
            write()
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                with contextlib.suppress(OSError):
                    print(
                        f"warning: standard output cannot be written ({error}): the training "
                        f"continues, and each line tries again; {self._elsewhere}",
                        file=sys.stderr,
                        flush=True,
                    )
