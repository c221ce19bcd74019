"""The command line of the training app."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from kenotron_ckpt import SaveFailed
from kenotron_command import FAILED, INTERRUPTED, installed_words
from kenotron_config import DEFAULT_CONFIG, Config, Mask, config_reference, json_schema
from kenotron_cost import check_machine, cost_plan, host_cautions, without_gpus
from kenotron_dist import Mesh, RankError, explained, resolve, visible_gpus
from kenotron_dist.diagnosis import Diverged, PeerLost
from kenotron_dist.launch import launcher
from kenotron_train.config_file import load_config
from kenotron_train.data.own_data import Hook, check_hook
from kenotron_train.doremi.cli import doremi_main, doremi_parser
from kenotron_train.evaluate.cli import evaluate_main, evaluate_parser
from kenotron_train.evaluate.evaluator import check_evaluate
from kenotron_train.failures.last_failure import latest_start, told
from kenotron_train.failures.passing_errors import as_passing, status_of
from kenotron_train.flag_reference import flag_reference
from kenotron_train.kubernetes.cli import kubernetes_main, kubernetes_parser
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.log.instrumentation import check_watching
from kenotron_train.log.printing import fail, say, warn
from kenotron_train.new_folder import new_main, new_parser
from kenotron_train.preflight.cli import preflight_main, preflight_parser
from kenotron_train.replay.replay import replay
from kenotron_train.report.cli import report_main, report_parser
from kenotron_train.run.adapters import check_adapter_file
from kenotron_train.run.dry_run import dry_run_of
from kenotron_train.run.elastic import with_those_left
from kenotron_train.run.loop import run
from kenotron_train.run.preview import cannot_run, preview
from kenotron_train.run.start_ranks import start_ranks
from kenotron_train.run.stopping import STOPPED
from kenotron_train.slurm.cli import slurm_main, slurm_parser
from kenotron_train.train_flags import train_parser
from kenotron_train.verify.cli import verify_main, verify_parser

USER_ERRORS = (ValueError, OSError, FloatingPointError, SaveFailed, Diverged)
"""Errors whose message is enough; others come with a traceback."""


def main(
    argv: Sequence[str] | None = None, loader: Hook | None = None, *, leaves: bool = True
) -> int:
    """Train from a YAML file or the embedded default, draw a report, or submit; the exit status.

    ``loader`` is data of one's own for stages with ``dataset: null``, see
    ``own_data.Hook``. End the process with ``kenotron_dist.shutdown``; ``leaves``: it ends after a
    training, so that signals that come later do not change its status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        return _subcommand(words[0], words[1:])
    arguments = train_parser().parse_args(words)
    deadline = time.monotonic() + arguments.time_limit
    if arguments.json_schema:
        return _show(json_schema())
    return _run(arguments, loader, deadline, leaves)


SUBCOMMANDS: dict[str, Callable[[list[str]], int]] = {
    "new": new_main,
    "report": report_main,
    "slurm": slurm_main,
    "kubernetes": kubernetes_main,
    "preflight": preflight_main,
    "verify": verify_main,
    "evaluate": evaluate_main,
    "doremi": lambda words: doremi_main(words, lambda flags, leaves: main(flags, leaves=leaves)),
    "config-reference": lambda _: _show(config_reference()),
    "flag-reference": lambda _: _show(
        flag_reference(
            [train_parser(), new_parser(), slurm_parser(), kubernetes_parser(), verify_parser()]
            + [preflight_parser(), evaluate_parser(), doremi_parser(), report_parser()]
        )
    ),
}
"""Commands of the program besides training, by its first word."""


def _subcommand(name: str, words: list[str]) -> int:
    """Do what a first word asks for; exit with status 2 where there is no such thing."""
    if name in SUBCOMMANDS:
        return SUBCOMMANDS[name](words)
    if Path(name).suffix in (".yaml", ".yml"):
        advice = f"; a config is given with --config-file {shlex.quote(name)}"
    elif name in installed_words():
        advice = f"; it is a word of another program: kenotron {name}"
    else:
        near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
        advice = f"; did you mean {near[0]}?" if near else ""
    train_parser().error(
        f"there is no subcommand {name!r}{advice} (subcommands: {', '.join(SUBCOMMANDS)}; training "
        "needs none)"
    )


def _run(arguments: argparse.Namespace, loader: Hook | None, deadline: float, leaves: bool) -> int:
    """Train as the flags ask. Returns the exit status."""
    config, folder, before = None, None, None
    try:
        ranks = arguments.ranks or visible_gpus() or None
        config = load_config(arguments.config_file or DEFAULT_CONFIG, arguments.set, ranks)
        for flag in ("ranks", "max_restarts"):
            _check_processes(flag.replace("_", "-"), getattr(arguments, flag), config)
        folder = config.checkpoints.checkpoints_path
        before = latest_start(Path(folder))
        if arguments.check:
            _show(preview(config))
            general, model = config.general, config.model
            gpus = without_gpus(general.device, cuda_graph=model.cuda_graph)
            return 1 if cannot_run(config) or gpus else 0
        if arguments.dry_run:
            return _show(dry_run_of(config))
        check_hook(config.data_stages, loader)
        check_watching(config.logging.trackers, config.general.benchmark_csv_path)
        check_evaluate(config.evaluate)
        run = config.checkpoints
        check_adapter_file(
            config.model, config.adapter, Path(run.checkpoints_path), run.resume_checkpoint_path
        )
        cost = cost_plan(config)
        check_machine(cost, config.data_stages)
        for line in host_cautions(cost) if resolve(os.environ).rank == 0 else ():
            warn(line)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks and workers are many
        os.environ.setdefault("TQDM_DISABLE", "1")  # lines of a log, not bars of libraries
        limit = timedelta(seconds=arguments.stall_limit)
        given = (arguments.config_file is None, loader, deadline, arguments.replay_step, leaves)
        threads = arguments.threads

        def begin(config: Config, hooks: tuple[LifeCycle, ...]) -> str:
            more = {"leaves": leaves, "threads": threads}
            return start_ranks(_train, config, limit, *given, hooks, **more)

        stopped = with_those_left(begin, config, ranks, arguments.max_restarts)
    except KeyboardInterrupt:
        return interrupted()
    except (RankError, PeerLost, *USER_ERRORS) as error:
        return _failed(error, told(error, folder, before), Mask(config))
    except Exception as error:
        told(error, folder, before)
        raise
    return STOPPED if stopped else 0


def _train(
    mesh: Mesh,
    config: Config,
    sample: bool,
    loader: Hook | None,
    deadline: float,
    replayed: int | Path | None,
    leaves: bool,
    hooks: tuple[LifeCycle, ...],
) -> str:
    """Train, or replay a step, on a rank; return why it ended before the last step, if it did."""
    if replayed is not None:
        replay(mesh, config, replayed, loader)
        return ""
    try:
        done = run(mesh, config, sample, loader, deadline=deadline, leaves=leaves, hooks=hooks)
        return done.stopped
    except OSError as error:
        raise as_passing(error) from error


def _check_processes(flag: str, value: int | None, config: Config) -> None:
    """Refuse a flag of processes that nothing follows, or that a launcher decides."""
    if value is None:
        return
    if launcher() != "none":
        raise ValueError(
            f"--{flag} {value}: a launcher has started the processes; leave it out, or give it to "
            "the launcher"
        )
    if not config.parallelism.dp_auto:
        raise ValueError(
            f"--{flag} {value}: the config has {config.world_size} processes "
            f"({config.parallelism.described}); leave it out, or set parallelism.dp=auto"
        )


def interrupted() -> int:
    """Report that Ctrl-C ended the program. Returns the exit status."""
    return fail("interrupted", INTERRUPTED)


def _show(text: str) -> int:
    say(text)
    return 0


def _failed(error: Exception, said: str, mask: Mask) -> int:
    """Report what ended the run, the first cause last, then ``said``. Returns the exit status."""
    text, _ = explained(error, *USER_ERRORS) or (str(error), FAILED)
    return fail("\n".join(filter(None, (text, said))), status_of(error), mask)
