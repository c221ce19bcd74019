"""Names of the program: for its help and errors, and for ``--version``."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path


def called(*words: str) -> str:
    """The command that started this process, and words behind it."""
    own = Path(sys.argv[0]).name
    return " ".join([own if own == "kenotron-train" else "python apps/train", *words])


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``, which names torch, too."""
    text = f"kenotron-train {version('kenotron-train')}, torch {version('torch')}"
    parser.add_argument("--version", action="version", version=text, help="print it and end")
