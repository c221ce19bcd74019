"""Numbers of a command line that count something."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number from 1. Raises ArgumentTypeError for what is none."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)
