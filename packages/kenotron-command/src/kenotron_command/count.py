"""Numbers of a command line that count something."""

from __future__ import annotations

import argparse


def count(text: str, least: int = 1) -> int:
    """A whole number from ``least``. Raises ArgumentTypeError for what is none."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least}")
    return int(text)


def count_from_0(text: str) -> int:
    """A whole number from 0. Raises ArgumentTypeError for what is none."""
    return count(text, 0)
