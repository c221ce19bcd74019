"""``python -m kenotron_nanotron THEIRS OURS``: import a checkpoint of Nanotron or Kénotron.

Exit status: 0; 2 when it cannot be imported, with one sentence why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kenotron_ckpt import read_manifest
from kenotron_nanotron.conversion import import_nanotron


def main(arguments: Sequence[str] | None = None) -> int:
    """Import a checkpoint, and print what was not taken over; returns the exit status."""
    chosen = command_parser().parse_args(arguments)
    try:
        folder = import_nanotron(chosen.source, chosen.folder, optimizer=chosen.optimizer)
        manifest = read_manifest(folder)
    except (ValueError, OSError) as error:
        print(_shown(str(error)), file=sys.stderr)
        return 2
    print(_shown(f"{folder}: step {manifest.step}, {len(manifest.records)} records"))
    for note in manifest.state["imported"]["notes"]:
        print(_shown(f"  {note}"))
    return 0


def command_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    is_word = Path(sys.argv[0]).name == "kenotron"
    parser = argparse.ArgumentParser(
        prog="kenotron import-nanotron" if is_word else "python -m kenotron_nanotron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="its step folder, or its run folder")
    parser.add_argument("folder", type=Path, help="the run folder to write the step to")
    parser.add_argument("--optimizer", action="store_true", help="also Adam's state, from pickles")
    return parser


def _shown(text: str) -> str:
    """Text without what a terminal would obey: names may come from a hostile file."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


if __name__ == "__main__":
    sys.exit(main())
