"""``python -m kenotron_ckpt``: look at checkpoints, verify and compare them.

Exit status: 0; 1 when ``verify`` finds damage or ``diff`` a difference; 2 when a command cannot do
its work, with one sentence why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TextIO

from kenotron_ckpt.compare import differences
from kenotron_ckpt.folder import read_manifest, resolve_step
from kenotron_ckpt.inspection import describe, render
from kenotron_ckpt.verification import verify_steps
from kenotron_command import BAD_INPUT, called, framed, printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    chosen = command_parser().parse_args(arguments)
    return framed(lambda: chosen.run(chosen), ValueError, OSError, status=BAD_INPUT)


def _print(text: str, file: TextIO | None = None, flush: bool = False) -> None:
    """Print a text without what a terminal would obey: names may come from a hostile file."""
    print(printable(text), file=file, flush=flush)


def inspect(chosen: argparse.Namespace) -> int:
    """Print what is in a checkpoint."""
    data = describe(chosen.path)
    _print(json.dumps(data, indent=2) if chosen.json else render(data))
    return 0


def verify(chosen: argparse.Namespace) -> int:
    """Print a sentence for every damage on stderr, and one for every checkpoint that is right."""
    damaged = 0
    for where, faults in verify_steps(chosen.path):
        damaged += len(faults)
        for fault in faults:
            _print(f"{where}: {fault}", file=sys.stderr)
        if not faults:
            _print(f"{where}: every byte is as it was written")
    return 1 if damaged else 0


def diff(chosen: argparse.Namespace) -> int:
    """Print what differs between two checkpoints."""
    _print(f"A: {resolve_step(chosen.a)}\nB: {resolve_step(chosen.b)}")
    found = 0
    for sentence in differences(chosen.a, chosen.b):
        found += 1
        _print(sentence, flush=True)
    if not found:
        _print(f"equal: {len(read_manifest(chosen.a).records)} records, state and config")
    return 1 if found else 0


def command_parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    parser = argparse.ArgumentParser(
        prog=called("python -m kenotron_ckpt"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    path = "a step folder, or a run folder (its latest complete checkpoint); a path or a URL"

    one = commands.add_parser("inspect", help="the tree of tensors, totals, steps of a run")
    one.add_argument("path", help=path)
    one.add_argument("--json", action="store_true", help="all of it as JSON, every record")
    one.set_defaults(run=inspect)

    name = called("python -m kenotron_ckpt verify", name="kenotron-check-bytes")
    one = commands.add_parser("verify", prog=name, help="read every byte and compare checksums")
    one.add_argument("path", help="a step folder, or a run folder (all its steps); a path or a URL")
    one.set_defaults(run=verify)

    one = commands.add_parser("diff", help="what differs: records, values, state, config")
    one.add_argument("a", metavar="A", help=path)
    one.add_argument("b", metavar="B", help=path)
    one.set_defaults(run=diff)

    return parser


if __name__ == "__main__":
    sys.exit(main())
