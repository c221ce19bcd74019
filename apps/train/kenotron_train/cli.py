"""The command line of the training app."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta

from kenotron_dist import Mesh, RankError, spawn
from kenotron_train.config import Config
from kenotron_train.loop import train
from kenotron_train.yaml_config import DEFAULT_CONFIG, load_config

USER_ERRORS = (ValueError, OSError, FloatingPointError)
"""Errors whose message says all; others come with a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train from a YAML file, or the embedded default; the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        config = load_config(arguments.config_file or DEFAULT_CONFIG, arguments.set)
        return _run(config, sample=arguments.config_file is None)
    except USER_ERRORS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RankError as error:
        print(f"error: {error}" if _is_user_error(error) else error.trace, file=sys.stderr)
        return 1


def _run(config: Config, *, sample: bool) -> int:
    sizes = config.parallelism
    spawn(
        _worker,
        config,
        sample,
        pp=sizes.pp,
        dp=sizes.dp,
        tp=sizes.tp,
        timeout=timedelta(minutes=10),
    )
    return 0


def _worker(mesh: Mesh, config: Config, sample: bool) -> None:
    train(mesh, config, sample=sample)


def _is_user_error(error: RankError) -> bool:
    names = {each.__name__ for kind in USER_ERRORS for each in (kind, *kind.__subclasses__())}
    return error.kind in names or not error.trace


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python apps/train",
        description="Train a language model. Without a config file: a small model on the Python "
        "standard library's own sources, on two local processes.",
    )
    parser.add_argument("--config-file", metavar="YAML", help="a config in Nanotron's schema")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="override a value of the config, for example tokens.train_steps=20",
    )
    return parser
