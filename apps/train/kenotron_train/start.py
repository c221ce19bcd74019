"""The start of the program, before torch is imported: every line here delays the first step."""

import contextlib
import gc
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn, cast

LAUNCHED = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK")
"""Variables of which a launcher sets one: this process is then a rank and starts none."""

PRELOAD = ["numpy.random"]
"""Modules that every rank needs and this process does not."""

ALONE = ("--check", "--dry-run", "--json-schema", "--help", "-h", "--version")
"""Flags with which no rank is started."""


def starts_ranks(words: list[str]) -> bool:
    """Return whether ranks will be started as processes, as far as the command's words tell."""
    is_run = not words or words[0].startswith("-") or words[0] in ("verify", "evaluate")
    return is_run and not any(word in ALONE for word in words) and not is_launched()


def is_launched() -> bool:
    """Return whether a launcher has started this process, as ``kenotron_dist.environment`` does."""
    return any(name in os.environ for name in LAUNCHED)


def start_forkserver() -> None:
    """Start the process that ranks are forked from: a fork of this one, with torch imported.

    ``multiprocessing`` would start an interpreter that imports all of it a second time. As where
    ``kenotron_dist`` starts it, Ctrl-C is held back in it, and in each rank until that is ready to
    end. Ranks have the environment of this moment.
    """
    from multiprocessing import forkserver, resource_tracker, util

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks and workers are many
    os.environ.setdefault("TQDM_DISABLE", "1")  # lines of a log, not bars of libraries
    resource_tracker.ensure_running()  # here: it lets Ctrl-C in as soon as it has started its own
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    usual, fork = util.spawnv_passfds, cast(Any, _fork)
    util.spawnv_passfds = fork
    try:
        forkserver.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = usual
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fork(_path: str, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """Run ``python -c CODE`` in a fork of this process, with these file descriptors; its pid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of BLAS wait
        pid = os.fork()
    if pid == 0:
        _serve(arguments[-1], passed)
    return pid


def _serve(code: str, passed: Sequence[int]) -> NoReturn:
    """Run the code of a forkserver, and end this process."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number not in passed:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(number)
    try:
        exec(code, {})
    except SystemExit:
        os._exit(0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    os._exit(1)


def _leave(number: int, _frame: object) -> None:
    """End at Ctrl-C without a traceback, as the program does once it is imported."""
    os.write(2, b"error: interrupted\n")
    os._exit(128 + number)


def run() -> None:
    """Import the program, and run it."""
    if is_default := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)  # first: every import below takes its time
    gc.disable()  # nothing that is imported becomes garbage: looking for it takes 0.15 s
    from kenotron_train.program import program

    gc.freeze()
    gc.enable()
    if starts_ranks(sys.argv[1:]):
        start_forkserver()
    program(signal.default_int_handler if is_default else None)
