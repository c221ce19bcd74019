"""Inform peers of a failure: write its cause in the store, then close connections.

A rank that waits for it in gloo can be freed in no other way: no call interrupts a receive, but it
ends when the peer closes. On nccl it is the device that waits, and torch ends a process whose peer
has closed: so every rank listens for a cause, and ends its own part before. The groups are of no
use afterwards.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from kenotron_dist.axis import Axis
from kenotron_dist.device import bind_thread
from kenotron_dist.launch import signing_key
from kenotron_dist.signed_store import SignedStore

_NEVER = (1 << 30) + 77
"""A tag that is never sent."""
_EAR = 0.4
"""Seconds between two looks for a cause, in worlds of up to ``_SMALL`` ranks."""
_SMALL = 1000


class FailureBroadcast:
    """The store key of some groups for the first cause. Made on all ranks.

    Args:
        axes: those whose groups a failure closes; those of one rank are left out.
    """

    def __init__(self, axes: Iterable[Axis]) -> None:
        self._axes = list(
            {id(axis.group): axis for axis in axes if axis.group is not None}.values()
        )
        self._store: SignedStore | None = None
        self._ear = 0.0
        self.cause_found = ""
        """The cause, on nccl, once another rank has failed: this one closes its groups."""
        if self._axes:
            store = dist.distributed_c10d._get_default_store()
            times = store.add(f"kenotron-distress/{dist.get_rank()}", 1)
            self._store = SignedStore(store, f"kenotron-distress/{times}", signing_key())
        devices = {axis.control_device for axis in self._axes if axis.on_device}
        if devices:
            self._ear = _EAR * max(1.0, dist.get_world_size() / _SMALL)
            listening = weakref.ref(self), devices.pop()
            threading.Thread(target=_listen, args=listening, daemon=True).start()

    def call(self, cause: str) -> str:
        """Write a cause unless one stands, close the groups; the cause that came first.

        Peers that wait in one of the groups get a RuntimeError at once (gloo); on nccl their
        device continues, with numbers that mean nothing; ``cause_found`` is the reason.
        """
        first = cause
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # its host is gone
                first = self._store.compare_set("cause", "", cause).decode()
        if first == cause:
            time.sleep(1.5 * self._ear)  # let them end their part first
        self._close()
        return first

    def listen(self) -> None:
        """Look once whether another rank has called; if so close the groups."""
        cause = None if self._store is None else self._store.find("cause")
        if cause is not None:
            self.cause_found = cause.decode()  # first: waits end when groups close, meaninglessly
            self._close()

    def _close(self) -> None:
        """Close all groups, those on a device at once.

        NCCL's abort of one communicator may wait for the whole device, where an operation of
        another one hangs until that is aborted too (torch issue 119797).
        """
        device = [axis for axis in self._axes if axis.on_device]
        threads = [
            threading.Thread(target=_abort, args=(axis, axis.control_device), daemon=True)
            for axis in device
        ]
        for thread in threads:
            thread.start()
        for axis in self._axes:
            if not axis.on_device:
                _close(axis)
        for thread in threads:
            thread.join()


def _listen(weak: weakref.ref[FailureBroadcast], device: torch.device) -> None:
    """Body of the thread that listens as long as the ``FailureBroadcast`` is in use."""
    bind_thread(device)
    while (line := weak()) is not None and not line.cause_found:
        ear = line._ear
        with contextlib.suppress(RuntimeError):  # the store's host is gone, and soon this rank too
            line.listen()
        del line
        time.sleep(ear)


def _abort(axis: Axis, device: torch.device) -> None:
    """Abort the communicators of the axis' group; body of a thread."""
    group = axis.group
    assert group is not None
    bind_thread(device)
    with contextlib.suppress(RuntimeError):  # aborted before
        group.abort()


def _close(axis: Axis) -> None:
    """End every connection of the axis' group on gloo, also where others still refer to it."""
    group = axis.group
    for peer in axis.ranks:
        if peer == axis.ranks[axis.rank]:
            continue
        with contextlib.suppress(RuntimeError):  # the timeout, or that this peer has closed
            work = dist.irecv(torch.zeros(1), peer, group=group, tag=_NEVER)
            if work is not None:
                work.wait(timedelta(milliseconds=1))  # a timeout closes the pairs with all peers
