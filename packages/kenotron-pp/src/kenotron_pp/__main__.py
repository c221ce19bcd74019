"""``python -m kenotron_pp --schedule 1f1b --stages 4 --microbatches 8``: a schedule, drawn.

The exit status is 0, or 2 after one message on stderr that names the error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kenotron_pp.draw import draw, draw_text
from kenotron_pp.schedule import SCHEDULES, schedule_named
from kenotron_pp.simulate import Times, simulate


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong as every other error is said: without the usage before it."""
        self.exit(2, f"error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the cost of a schedule and draw it; the exit status."""
    options = _parser().parse_args(argv)
    try:
        schedule = schedule_named(options.schedule, options.chunks)
        times = Times(options.f, options.b, options.i, options.w, options.transfer)
        trace = simulate(schedule, options.stages, options.microbatches, times)
        if options.out:
            draw(trace, options.out)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lines = [
        f"{schedule.name}, {options.stages} ranks, {options.microbatches} micro-batches",
        f"{trace}\n{draw_text(trace)}",
        *([f"drawn to {options.out}"] if options.out else []),
    ]
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # the reader, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m kenotron_pp", description=__doc__)
    parser.add_argument("--schedule", default="1f1b", help=", ".join(SCHEDULES))
    parser.add_argument("--stages", type=int, default=4, help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, help="stages of a rank, for interleaved")
    parser.add_argument("--out", help="also draw it to this .svg or .png file")
    for name, value, what in (
        ("f", 1, "a forward"),
        ("b", 2, "a whole backward"),
        ("i", 1, "its input part"),
        ("w", 1, "its weight part"),
        ("transfer", 0, "a transfer to another rank"),
    ):
        parser.add_argument(f"--{name}", type=float, default=value, help=f"time of {what}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
