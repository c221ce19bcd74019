"""``python apps/train verify``: whether a layout computes what one process computes."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from kenotron_command import BAD_INPUT, add_config_flags, count, framed
from kenotron_config import DEFAULT_CONFIG, ParallelismConfig
from kenotron_dist.launch import launcher, threads_of_rank
from kenotron_models import TransformersSpec
from kenotron_train.called import parser_of
from kenotron_train.config_file import load_config
from kenotron_train.log.printing import fail
from kenotron_train.verify.changes import changes
from kenotron_train.verify.comparison import allowed, compare_with_one
from kenotron_train.verify.report import Verdict, show, write_json
from kenotron_train.verify.shrink import has_documents, shrink

RANKS = 8
STEPS = 3
CURVE = 5
"""Steps of a model of transformers."""


def verify_main(argv: Sequence[str]) -> int:
    """Compare a small copy of a config's layout with one process; the exit status.

    0: they agree; 1: they do not, or the layout does not run; 2: there is nothing to compare.
    """
    given = verify_parser().parse_args(argv)
    return framed(lambda: _verify(given), OSError, ValueError, status=BAD_INPUT, report=fail)


def _verify(given: argparse.Namespace) -> int:
    begin = time.monotonic()
    name = given.config_file or "the embedded config"
    if launcher() != "none":
        raise ValueError("verify starts its processes itself: run it without a launcher")
    target = None if given.json is None else _target(given.json)
    config = load_config(given.config_file or DEFAULT_CONFIG, given.set)
    curve = isinstance(config.decoder, TransformersSpec)  # it is compared with plain torch
    small = shrink(config, given.ranks, given.steps or (CURVE if curve else STEPS))
    before, after = config.parallelism, small.parallelism
    _check_ranks(before, after, given.ranks)
    threads = given.threads or threads_of_rank(after.world_size)
    layers, compiled = small.decoder.num_hidden_layers, small.model.compile
    exact = config.general.reproducible
    bound = 0.0 if exact else allowed(after, layers, compiled=compiled)
    outcome = compare_with_one(small, has_documents(config), threads, bound)
    different = changes(config, small)
    verdict = Verdict(name, before, after, small.tokens, bound, different, outcome)
    show(verdict, time.monotonic() - begin)
    if target is not None:
        write_json(target, verdict)
    return 0 if verdict.passed else 1


def _check_ranks(before: ParallelismConfig, after: ParallelismConfig, ranks: int) -> None:
    if after.world_size == 1 < before.world_size:
        raise ValueError(
            f"--ranks {ranks}: nothing is left of {before.described} to compare with "
            "one process; give more"
        )


def _target(text: str) -> Path:
    """Return the file to write, checked before the comparison."""
    target = Path(text)
    if target.is_dir():
        raise ValueError(f"--json {target}: this is a folder; give the path of a file")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"--json {target}: there is no folder {target.parent}; make it first")
    if not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
        raise ValueError(f"--json {target}: no permission to write there; name another file")
    return target


def verify_parser() -> argparse.ArgumentParser:
    """The flags of ``verify``."""
    parser = parser_of(
        "verify",
        "Compare a config's layout with one process, before GPU hours are spent: a "
        "small copy of the same structure runs for some steps on local CPU processes, and losses, "
        "gradients and weights must be those of one process. A model of transformers is also "
        "compared with itself in plain torch. Exit status 0: they are; 1: they are "
        "not; 2: the config cannot be used, or nothing could be compared. An axis for which "
        "--ranks does not suffice is named and not compared. Nothing that the config names is "
        "read or written.",
    )
    add = parser.add_argument
    add_config_flags(parser)
    add(
        "--ranks", type=count, default=RANKS, metavar="N",
        help=f"processes at most; a larger layout is made smaller (default: {RANKS})",
    )  # fmt: skip
    add(
        "--steps", type=count, metavar="N",
        help=f"default: {STEPS}, and {CURVE} for a model of transformers",
    )  # fmt: skip
    add(
        "--threads", type=count, metavar="N",
        help="of each process, also of the one alone (default: OMP_NUM_THREADS, else a share of "
        "the cores)",
    )  # fmt: skip
    add("--json", metavar="FILE", help="write what was compared, for programs")
    return parser
