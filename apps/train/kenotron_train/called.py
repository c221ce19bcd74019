"""Names of the program: for its help and errors, and for ``--version``."""

from __future__ import annotations

import argparse
from importlib.metadata import version

from kenotron_command import called as command_called


def called(*words: str) -> str:
    """Return the command that started this process, and words behind it."""
    return command_called("python apps/train", words, name="kenotron-train")


def parser_of(word: str, description: str) -> argparse.ArgumentParser:
    """Return a parser without flags of a word behind the command, such as ``plan``."""
    return argparse.ArgumentParser(prog=called(word), description=description)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add ``--version``, which names torch, too."""
    text = f"kenotron-train {version('kenotron-train')}, torch {version('torch')}"
    parser.add_argument("--version", action="version", version=text, help="print it and end")
