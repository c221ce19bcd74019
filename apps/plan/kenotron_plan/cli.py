"""``python apps/plan``: does it fit, which layout, and what limits it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

from kenotron_command import BAD_INPUT, add_config_flags, count, framed
from kenotron_command.charts import WITHOUT_MATPLOTLIB, can_draw
from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_cost import (
    RECOMPUTES,
    SEARCH_KEYS,
    SEARCH_REMARKS,
    Machine,
    Planned,
    Refused,
    known_machines,
    machine_named,
    plan_of_run,
    search_names,
    with_model,
)
from kenotron_plan.calibrate import calibrate_main
from kenotron_plan.memory_curve import write_page
from kenotron_plan.program import fail, load_config, program, say
from kenotron_plan.table import (
    WIDTH,
    best_lines,
    figures,
    note_lines,
    own_lines,
    refused_lines,
)
from kenotron_plan.written import check_new, script_of, write_config

KNOWN = OSError, ValueError, ModuleNotFoundError
GPUS = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w.-]*)")
"""``8xH100``, ``H100``, or ``16x8xH100``: nodes, devices of a node, a machine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Plan a training, or measure this machine; the exit status.

    0: a layout fits; 1: none does; 2: the flags, config or machine cannot be used.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["calibrate"]:
        return calibrate_main(words[1:])
    given = plan_parser().parse_args(words)
    return framed(lambda: _plan(given), *KNOWN, status=BAD_INPUT, report=fail)


def _plan(given: argparse.Namespace) -> int:
    machine, ranks = _machine(given)
    # What would fail after a long search is refused before it.
    if given.html and not can_draw():
        raise ModuleNotFoundError(f"--html {given.html}: {WITHOUT_MATPLOTLIB}")
    for flag in ("json", "write", "html"):
        if (path := getattr(given, flag)) and Path(path).is_dir():
            raise ValueError(f"--{flag} {path}: this is a folder; give the path of a file")
    if given.write:
        check_new(Path(given.write))
    config, search = _config(given, ranks), search_names(given.search) if given.search else ()
    room = machine["memory"] if given.memory is None else given.memory * 1e9
    planned = plan_of_run(
        config, machine, room, ranks, given.objective, given.price,
        given.imbalance,
        search,
    )  # fmt: skip
    lines = [*_lines(planned, machine)]
    lines += [f"Searched: {SEARCH_REMARKS[name]}" for name in search if name in SEARCH_REMARKS]
    say("\n".join(lines))
    if given.json:
        Path(given.json).write_text(json.dumps(_json(planned, machine), indent=2) + "\n", "utf-8")
    # A page can show a layout that does not fit; a config is written of one that does only.
    chosen = planned.chosen
    if given.html and (drawn := chosen or planned.own):
        title = f"{drawn.plan.parallelism.described} on {machine.name}"
        write_page(Path(given.html), planned.planner, drawn, lines, title)
    if given.write and chosen is not None:
        line = write_config(config, chosen.layout, Path(given.write), machine.devices)
        say(f"\nWritten: {given.write}, {script_of(Path(given.write))}\nStart it: {line}")
    return 0 if chosen is not None else 1


def _config(given: argparse.Namespace, ranks: int | None) -> Config:
    """Return the config of the flags."""
    config = load_config(given.config_file or DEFAULT_CONFIG, given.set)
    if given.model is None:
        if given.batch or given.sequence_length:
            raise ValueError("--sequence-length and --batch go with --model; a config has its own")
        return config
    if ranks is None or not given.batch or not given.sequence_length:
        raise ValueError(f"--model {given.model}: give --gpus, --sequence-length and --batch, too")
    return with_model(config, Path(given.model), given.sequence_length, given.batch)


def _machine(given: argparse.Namespace) -> tuple[Machine, int | None]:
    """Return the machine of the flags, and the number of ranks if they say it."""
    ranks = given.ranks
    if given.gpus is None:
        return machine_named(given.machine or "h100"), ranks
    if (found := GPUS.fullmatch(given.gpus)) is None:
        raise ValueError(
            f"--gpus {given.gpus}: give their number and kind: 8xH100, or nodes, too: 16x8xH100"
        )
    first, second, kind = found.groups()
    number = int(first or 1) * int(second or 1)
    if ranks not in (None, number):
        raise ValueError(
            f"--ranks {ranks}: --gpus {given.gpus} are {number}; leave one of them out"
        )
    return machine_named(given.machine or kind), number


def _lines(planned: Planned, machine: Machine) -> Iterator[str]:
    """Yield the lines of a plan."""
    own, training = planned.own, planned.training
    if own is not None:
        yield "The layout of the config"
        yield from own_lines(own, machine, training)
        yield from _remedies(planned)
        yield ""
    if (found := planned.found) is not None:
        none = "" if planned.fitting else "; none fits: those that lack least memory"
        yield (
            f"{found.tried:,} legal layouts of {planned.ranks:,} ranks, by {planned.objective}"
            f"{none}"
        )
        yield from best_lines(found, machine, training)
        yield ""
        if found.best and (own is None or planned.fitting):
            yield "The first of them"
            yield from own_lines(planned.chosen or found.best[0], machine, training)
            yield from _remedies(planned) if own is None else ()
            yield ""
        yield from _about_refused(planned.refused)
    if shown := own or (planned.found.best[0] if planned.found else None):
        yield from note_lines(shown, machine, training)


def _remedies(planned: Planned) -> Iterator[str]:
    for line in planned.remedies:
        yield from wrap(line, WIDTH, initial_indent="* ", subsequent_indent="  ")


def _about_refused(refused: Refused) -> Iterator[str]:
    if refused.reasons:
        yield "Not legal"
        yield from refused_lines(refused)
        yield ""


def _json(planned: Planned, machine: Machine) -> dict[str, object]:
    """Return a plan for programs."""
    training = planned.training
    best = planned.found.best if planned.found else []
    return {
        "machine": {"name": machine.name, "date": machine.date, "sources": machine.sources()},
        "own": None if planned.own is None else figures(planned.own, machine, training),
        "remedies": planned.remedies,
        "layouts": [figures(each, machine, training) for each in best],
        "refused": dict(planned.refused.reasons),
    }


def _factor(text: str) -> float:
    """Return a factor from 1. Raises ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} was given; it must be a number from 1: 1.2")
    return value


def plan_parser() -> argparse.ArgumentParser:
    """The flags of ``plan``."""
    parser = argparse.ArgumentParser(
        prog=program(),
        description="Say whether a training fits into the memory of its devices, how long it "
        "takes, and what limits it; with --ranks or --gpus for every legal layout, of which the "
        "ten best are shown. Nothing is started. Sizes are those of the code that trains, "
        "measured on torch's meta device; times follow from the numbers of a machine file. Exit "
        "status 0: a layout fits; 1: none does; 2: the config or the machine cannot be used.",
    )
    add = parser.add_argument
    add_config_flags(parser)
    what = "a folder of Hugging Face with config.json; the rest is as in the config file"
    add("--model", metavar="FOLDER", help=what)
    add("--sequence-length", type=count, metavar="N", help="with --model: tokens of a sample")
    what = "with --model: tokens of a global batch, 4194304 or 4M (K: 2^10, M: 2^20)"
    add("--batch", metavar="TOKENS", help=what)
    add("--ranks", type=count, metavar="N", help="search all layouts of N ranks")
    what = "search all layouts of these devices: 8xH100, or nodes, too: 16x8xH100"
    add("--gpus", metavar="NUMBERxKIND", help=what)
    known = ", ".join(known_machines())
    what = f"a machine file, or one of {known} (default: that of --gpus, else h100)"
    add("--machine", metavar="FILE", help=what)
    add("--memory", type=float, metavar="GB", help="of a device (default: the machine's)")
    objectives = ("time", "memory", "price")
    what = "order of the layouts (default: time)"
    add("--objective", choices=objectives, default=objectives[0], help=what)
    what = "of a device and hour; the price of the whole training is then shown"
    add("--price", type=float, metavar="MONEY", help=what)
    what = f"search these keys, too, with --ranks or --gpus: {', '.join(SEARCH_KEYS)}"
    add("--search", metavar="NAMES", help=what)
    what = "tokens of the fullest rank's experts, times an even load's (default: 1, an even load)"
    add("--imbalance", type=_factor, default=1.0, metavar="FACTOR", help=what)
    add("--json", metavar="FILE", help="write the plan for programs, its layouts under `layouts`")
    what = "write a page with the plan and the memory of a step over time; needs matplotlib"
    add("--html", metavar="FILE", help=what)
    what = "write the config on the best layout, and next to it a script (.sh) that starts it"
    add("--write", metavar="FILE", help=what)
    parser.epilog = (
        f"recomputation that is tried: {', '.join(RECOMPUTES)}; `calibrate --write FILE` "
        "measures this machine for --machine FILE"
    )
    return parser
