"""The flags of a training."""

from __future__ import annotations

import argparse
import math

from kenotron_command import count, count_from_0
from kenotron_train.called import add_version, called
from kenotron_train.replay.replay import step_or_record
from kenotron_train.run.replacements import MAX_RESTARTS
from kenotron_train.run.stopping import STOPPED
from kenotron_train.slurm.durations import seconds_of


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


COMMANDS = """\
commands, each with its own --help:
  new DIR           write a folder to begin with
  plan              memory and time of all layouts
  verify            compare a layout with one process
  report RUN ...    draw runs
  evaluate          evaluate a checkpoint
  slurm             submit a training, or write its script
  kubernetes        print the manifest of a training
  preflight         measure the machines before a run
  doremi            learn the weights of domains
  config-reference  what every key of a config means
  flag-reference    what every flag does"""


def _duration(text: str) -> float:
    """Seconds of ``--time-limit``."""
    try:
        seconds = seconds_of(text, "seconds")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text} is no time above 0")
    return seconds


def _add_instead_of_training(parser: argparse.ArgumentParser) -> None:
    """Add flags with which nothing is trained."""
    parser.add_argument(
        "--check",
        action="store_true",
        help="do not train: check the config and print it with layout, sizes and memory",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="do not train: make one step of every distinct rank of the layout without values, "
        "processes or data, and compare what ranks would communicate; any number of ranks",
    )
    parser.add_argument(
        "--json-schema",
        action="store_true",
        help="do not train: print a JSON schema of configs, for editors",
    )


def train_parser() -> argparse.ArgumentParser:
    """Return the flags of a training."""
    parser = argparse.ArgumentParser(
        prog=called(),
        description="Train a language model. Without a config file: a small model on the Python "
        "standard library's own sources, on two local processes.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    parser.add_argument("--config-file", metavar="YAML", help="a config in Nanotron's schema")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="override a value of the config, for example tokens.train_steps=20",
    )
    _add_instead_of_training(parser)
    _add_processes(parser)
    parser.add_argument(
        "--replay-step",
        type=step_or_record,
        metavar="N or FILE",
        help="do not train: make step N, or that of a record in nonfinite, again from the "
        "checkpoint before it, and show its gradient",
    )
    parser.add_argument(
        "--time-limit",
        type=_duration,
        default=math.inf,
        metavar="TIME",
        help=f"save and end before so much time is over, with exit status {STOPPED}: seconds, or a "
        "time as Slurm writes it (11:55:00, 2-00:00:00)",
    )
    return parser


def _add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the processes and their threads."""
    parser.add_argument(
        "--ranks",
        type=count,
        metavar="N",
        help="local processes that parallelism.dp: auto follows (default: a process a GPU, else "
        "those of one data rank)",
    )
    parser.add_argument(
        "--max-restarts",
        type=count_from_0,
        metavar="K",
        help="without a launcher and with parallelism.dp: auto: start at most K processes in place "
        f"of lost ones, each at the next checkpoint (default: {MAX_RESTARTS}; 0: none)",
    )
    parser.add_argument(
        "--stall-limit",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="report a rank that lets others wait longer than this (default: 300), or that has not "
        "met them by then (30 at least)",
    )
    parser.add_argument(
        "--threads",
        type=count,
        metavar="N",
        help="CPU threads of each rank (default: OMP_NUM_THREADS, else an equal share of the "
        "cores)",
    )
