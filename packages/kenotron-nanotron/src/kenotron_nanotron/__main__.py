"""``python -m kenotron_nanotron THEIRS OURS``: import a checkpoint of Nanotron or Kénotron."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kenotron_ckpt import read_manifest
from kenotron_command import called, framed, printable
from kenotron_nanotron.conversion import import_nanotron


def main(arguments: Sequence[str] | None = None) -> int:
    """Import a checkpoint, and print what was not taken over; returns the exit status."""
    chosen = command_parser().parse_args(arguments)
    return framed(lambda: _import(chosen), ValueError, OSError)


def _import(chosen: argparse.Namespace) -> int:
    folder = import_nanotron(chosen.source, chosen.folder, optimizer=chosen.optimizer)
    manifest = read_manifest(folder)
    print(printable(f"{folder}: step {manifest.step}, {len(manifest.records)} records"))
    for note in manifest.state["imported"]["notes"]:
        print(printable(f"  {note}"))
    return 0


def command_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    parser = argparse.ArgumentParser(
        prog=called("python -m kenotron_nanotron", name="kenotron-import-nanotron"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="its step folder, or its run folder")
    parser.add_argument("folder", type=Path, help="the run folder to write the step to")
    parser.add_argument("--optimizer", action="store_true", help="also Adam's state, from pickles")
    return parser


if __name__ == "__main__":
    sys.exit(main())
