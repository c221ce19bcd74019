"""``python apps/train preflight``: the machines of a run, measured before it starts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kenotron_ckpt import replace_text
from kenotron_command import BAD_INPUT, FAILED, OK, count, framed
from kenotron_dist import Mesh, MeshConfig, RankError, resolve, start, visible_gpus
from kenotron_train.called import parser_of
from kenotron_train.log.printing import fail, say
from kenotron_train.preflight.measures import RankRates, rates_of_all
from kenotron_train.preflight.odd_ranks import UNITS, odd_ranks

SECONDS, TOLERANCE = 20.0, 1.5
PARTS = 4
"""Measurements, which share the seconds."""


def preflight_main(argv: Sequence[str]) -> int:
    """Measure all ranks and name those that are slower than the others; the exit status.

    0: none is; 1: one is; 2: they could not be measured.
    """
    given = preflight_parser().parse_args(argv)
    known = (OSError, ValueError, RankError)
    return framed(lambda: _preflight(given), *known, status=BAD_INPUT, report=fail)


def _preflight(given: argparse.Namespace) -> int:
    world = resolve(os.environ)
    if given.ranks is not None and world.launcher != "none":
        raise ValueError(f"--ranks: {given.ranks} was given; a launcher has started the ranks")
    if not given.tolerance > 1:
        raise ValueError(f"--tolerance: {given.tolerance} was given; it must be above 1")
    if not given.seconds > 0:
        raise ValueError(f"--seconds: {given.seconds} was given; it must be above 0")
    own = given.ranks or visible_gpus() or 1
    config = MeshConfig(dp=own if world.launcher == "none" else world.world_size)
    what = Path(given.folder), given.seconds, given.tolerance, given.json
    return start(_measure, *what, config=config)


def _measure(mesh: Mesh, folder: Path, seconds: float, tolerance: float, target: str | None) -> int:
    rates = rates_of_all(mesh, folder, seconds / PARTS)
    odd = odd_ranks(rates, tolerance)
    if mesh.rank == 0:
        for line in _table(rates):
            say(line)
        say("\n".join(odd) or f"No rank is {tolerance:g} times slower than the others")
        if target is not None:
            found = {"ranks": [asdict(each) for each in rates], "slow": odd}
            replace_text(Path(target), json.dumps(found, indent=1) + "\n")
    return FAILED if odd else OK


def _table(rates: Sequence[RankRates]) -> list[str]:
    wide = max(len("host"), *(len(each.host) for each in rates))
    lines = [f"rank  {'host':<{wide}}" + "".join(f"{f'{n} {u}':>18}" for n, u in UNITS.items())]
    for each in rates:
        values = (getattr(each, name) for name in UNITS)
        shown = "".join(f"{'-' if x is None else f'{x:.3g}':>18}" for x in values)
        lines.append(f"{each.rank:>4}  {each.host:<{wide}}{shown}")
    return lines


def preflight_parser() -> argparse.ArgumentParser:
    """Return the flags of `preflight`."""
    parser = parser_of(
        "preflight",
        "Measure products, memory, disk and links of every rank, all at once, and name "
        "what is slower than the rest: run it under the launcher that will start the training.",
    )
    add = parser.add_argument
    what = "local processes (default: one for each GPU, or one); a launcher starts its own"
    add("--ranks", type=count, metavar="N", help=what)
    what = "folder whose disk is measured, that of the checkpoints (default: the current one)"
    add("--folder", default=".", metavar="DIR", help=what)
    what = f"for all measurements together (default: {SECONDS:g})"
    add("--seconds", type=float, default=SECONDS, help=what)
    what = f"a rank is named where the others are so many times as fast (default: {TOLERANCE:g})"
    add("--tolerance", type=float, default=TOLERANCE, metavar="TIMES", help=what)
    add("--json", metavar="FILE", help="write the rates of all ranks into FILE, too")
    return parser
