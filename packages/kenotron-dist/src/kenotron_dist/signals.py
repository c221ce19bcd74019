"""Signals that ask a program to stop, or to save, at its next step; a second one ends it at once.

A thread receives them, also while the main thread is blocked in a communication. Programs that
start ranks pass theirs on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker

from kenotron_dist.exit_process import leave

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""They ask for an end. Slurm sends SIGUSR1 before the time is over where ``--signal`` asks for it;
a terminal that closes sends SIGHUP, which stays ignored where it was (``nohup``)."""
SAVES = signal.SIGUSR2
"""It asks for a checkpoint; the program continues."""
ECHO = 1.0
"""Seconds in which a further signal is the same request: Ctrl-C reaches ranks twice."""


class Signals:
    """Requests that this process was sent. See ``listening``."""

    def __init__(self) -> None:
        self.stop = 0
        """Number of the first signal that asked for an end; 0 while none has."""
        self.finished = False
        """Set by a program that has done its work and leaves: requests for an end are ignored from
        then on, also after ``listening``, so that its exit status stays what it is."""
        self._since = 0.0
        self._save = False

    def take_save(self) -> bool:
        """Return whether a checkpoint was asked for since this was last called."""
        found, self._save = self._save, False
        return found

    def receive(self, number: int) -> None:
        """A signal has come. A second request for an end is this process' end."""
        now = time.monotonic()
        if number == SAVES:
            self._save = True
        elif number in STOPS and not self.stop:
            self._since, self.stop = now, number
        elif number in STOPS and now - self._since > ECHO and not self.finished:
            leave(128 + number)


@contextlib.contextmanager
def listening() -> Iterator[Signals]:
    """Receive ``STOPS`` and ``SAVES`` inside the context, without acting on them.

    Afterwards the former handlers are back, unless ``finished`` was set.

    In another thread than the main one Python sets no handlers: then nothing is received.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    listener = threading.Thread(
        target=_listen, args=(read, signals.receive), name="kenotron-signals", daemon=True
    )
    with handling(lambda number: None, lambda: signals.finished):
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        listener.start()
        try:
            yield signals
        finally:
            signal.set_wakeup_fd(before)
            os.close(write)  # ends the thread, which closes its own end
            listener.join()


@contextlib.contextmanager
def handling(
    handle: Callable[[int], None], is_finished: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Call ``handle`` with the number of a signal inside the context. Only in the main thread.

    SIGHUP is left alone where it is ignored. Afterwards the former handlers are back; where
    ``is_finished`` returns True, these signals are ignored instead.
    """
    no_hang_up = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    before = {
        number: signal.signal(number, lambda number, _: handle(number))
        for number in (*STOPS, SAVES)
        if not (no_hang_up and number == signal.SIGHUP)
    }
    try:
        yield
    finally:
        ignored = is_finished()
        for number, handler in before.items():
            former = signal.SIG_DFL if handler is None else handler
            signal.signal(number, signal.SIG_IGN if ignored else former)


def _listen(read: int, receive: Callable[[int], None]) -> None:
    """Body of the thread. C code writes each signal's number to the pipe as it comes."""
    while numbers := os.read(read, 64):
        for number in numbers:
            receive(number)
    os.close(read)


@contextlib.contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Hold Ctrl-C back in this thread and in processes that start from it, which must let it in.

    It reaches all processes at once: one that still loads torch would print a traceback.
    """
    resource_tracker.ensure_running()  # here: it lets Ctrl-C in as soon as it has started its own
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
