"""The command line of the training app."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from kenotron_ckpt import SaveFailed
from kenotron_dist import (
    STALLED,
    Diverged,
    Mesh,
    PeerLost,
    RankError,
    first_to_say,
)
from kenotron_train.availability import check_available
from kenotron_train.config import Config
from kenotron_train.durations import seconds_of
from kenotron_train.failures import latest_start, told
from kenotron_train.flag_reference import flag_reference
from kenotron_train.loop import run
from kenotron_train.own_data import Hook, check_hook
from kenotron_train.preview import json_schema, preview
from kenotron_train.printing import say
from kenotron_train.reference import config_reference
from kenotron_train.replay import replay, step_or_record
from kenotron_train.report_cli import report_main, report_parser
from kenotron_train.slurm_cli import slurm_main, slurm_parser
from kenotron_train.start_ranks import start_ranks
from kenotron_train.stopping import STOPPED
from kenotron_train.verify_cli import verify_main, verify_parser
from kenotron_train.watching import check_watching
from kenotron_train.yaml_config import DEFAULT_CONFIG, load_config

USER_ERRORS = (ValueError, OSError, FloatingPointError, SaveFailed, Diverged)
"""Errors whose message says all; others come with a traceback."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None, loader: Hook | None = None) -> int:
    """Train from a YAML file or the embedded default, draw a report, or submit; the exit status.

    ``loader`` is data of one's own for stages whose config says ``dataset: null``, see
    ``own_data.Hook``. End the process with ``kenotron_dist.shutdown``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["report"]:
        return report_main(words[1:])
    if words[:1] == ["config-reference"]:
        return _show(config_reference())
    if words[:1] == ["flag-reference"]:
        return _show(flag_reference([_parser(), slurm_parser(), verify_parser(), report_parser()]))
    if words[:1] == ["slurm"]:
        return slurm_main(words[1:])
    if words[:1] == ["verify"]:
        return verify_main(words[1:])
    arguments = _parser().parse_args(words)
    deadline = time.time() + arguments.time_limit
    if arguments.json_schema:
        return _show(json_schema())
    with ExitStack() as held:
        return _run(arguments, loader, deadline, held)


def _run(
    arguments: argparse.Namespace, loader: Hook | None, deadline: float, held: ExitStack
) -> int:
    """Train as the flags say; the exit status."""
    config, before = None, None
    try:
        config = load_config(arguments.config_file or DEFAULT_CONFIG, arguments.set)
        before = held.enter_context(latest_start(Path(config.checkpoints.checkpoints_path)))
        if arguments.check:
            return _show(preview(config))
        check_available(config)
        check_hook(config, loader)
        check_watching(config)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks and workers are many
        limit = timedelta(seconds=arguments.stall_limit)
        given = (arguments.config_file is None, loader, deadline, arguments.replay_step)
        stopped = start_ranks(_train, config, limit, *given)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except (RankError, PeerLost, *USER_ERRORS) as error:
        return _failed(error, told(error, config, before))
    except Exception as error:
        told(error, config, before)
        raise
    return STOPPED if stopped else 0


def _train(
    mesh: Mesh,
    config: Config,
    sample: bool,
    loader: Hook | None,
    deadline: float,
    replayed: int | Path | None,
) -> str:
    """What every rank does; why it stopped before the last step, if it did."""
    if replayed is not None:
        replay(mesh, config, replayed, loader)
        return ""
    return run(mesh, config, sample, loader, deadline=deadline).stopped


def _show(text: str) -> int:
    say(text)
    return 0


def _failed(error: Exception, said: str) -> int:
    """Say what ended the run, the first cause last, then what is ``said``; the exit status."""
    text, code = str(error), 1
    if isinstance(error, PeerLost):
        code = STALLED
    elif isinstance(error, RankError):
        known = error.is_any(*USER_ERRORS, PeerLost) or not error.trace
        text, code = (text if known else error.trace), error.code
    return _fail("\n".join(filter(None, (text, said))), code)


def _fail(text: str, code: int = 1) -> int:
    Console().show_cursor()  # a rank that died may have left its progress bar unfinished
    if first_to_say(text):
        print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def _duration(text: str) -> float:
    """Seconds of ``--time-limit``."""
    try:
        seconds = seconds_of(text, "seconds")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text} is no time above 0")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python apps/train",
        description="Train a language model. Without a config file: a small model on the Python "
        "standard library's own sources, on two local processes. `report RUN_DIR ...` draws runs, "
        "`slurm --nodes N ...` submits one, `verify` compares a layout with one process, "
        "`config-reference` prints what every key means, `flag-reference` what every flag does.",
    )
    parser.add_argument("--config-file", metavar="YAML", help="a config in Nanotron's schema")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="override a value of the config, for example tokens.train_steps=20",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="do not train: check the config and print it with layout, sizes and memory",
    )
    parser.add_argument(
        "--json-schema",
        action="store_true",
        help="do not train: print a JSON schema of configs, for editors",
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
