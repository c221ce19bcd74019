"""The start of the program, before torch is imported: every line here delays the first step."""

import gc
import os
import signal
import sys

LAUNCHED = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK", "PMIX_RANK")
"""Variables of which a launcher sets one: this process is then a rank and starts none."""

PRELOAD = ["torch", "kenotron_dist", "kenotron_train.cli"]
"""Modules that ranks need and the forkserver imports, while this process imports them too."""

ALONE = ("--check", "--json-schema", "--help", "-h", "--version")
"""Flags with which no rank is started."""

STARTED: list[int] = []
"""The forkserver, if this process has started it here."""


def starts_ranks(words: list[str]) -> bool:
    """Return whether ranks will be started as processes, as far as the command's words tell."""
    is_run = not words or words[0].startswith("-") or words[0] in ("verify", "evaluate")
    return is_run and not any(word in ALONE for word in words) and not is_launched()


def is_launched() -> bool:
    """Return whether a launcher has started this process, as ``kenotron_dist.environment`` does."""
    return any(name in os.environ for name in LAUNCHED)


def start_forkserver() -> None:
    """Start the process that ranks are forked from: it imports torch while this process does too.

    As where ``kenotron_dist`` starts it, Ctrl-C is held back in it, and in each rank until that is
    ready to end. Ranks have the environment of this moment.
    """
    from multiprocessing import forkserver, resource_tracker

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks and workers are many
    os.environ.setdefault("TQDM_DISABLE", "1")  # lines of a log, not bars of libraries
    resource_tracker.ensure_running()  # here: it lets Ctrl-C in as soon as it has started its own
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid := getattr(forkserver._forkserver, "_forkserver_pid", None):
        STARTED.append(pid)


def end_forkserver() -> None:
    """End it now: it would notice the end of this process only once it has imported all."""
    if STARTED:
        try:
            os.kill(STARTED.pop(), signal.SIGKILL)
        except ProcessLookupError:
            pass


def _leave(number: int, _frame: object) -> None:
    """End at Ctrl-C without a traceback, as the program does once it is imported."""
    end_forkserver()
    os.write(2, b"error: interrupted\n")
    os._exit(128 + number)


def run() -> None:
    """Import the program, and run it."""
    if is_default := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)  # first: every import below takes its time
    if starts_ranks(sys.argv[1:]):
        start_forkserver()
    gc.disable()  # nothing that is imported becomes garbage: looking for it takes 0.15 s
    from kenotron_train.program import program

    gc.freeze()
    gc.enable()
    program(signal.default_int_handler if is_default else None, end_forkserver)
