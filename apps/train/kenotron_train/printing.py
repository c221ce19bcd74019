"""Printing for a reader who may stop reading: ``python apps/train ... | head``."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Print a line, or several; a reader that has seen enough changes no exit status."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
