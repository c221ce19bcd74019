"""How a rank that fails tells its peers: the cause in the store, then closed connections.

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

from kenotron_dist.mesh import Axis

_NEVER = (1 << 30) + 77
"""A tag that nobody sends with."""
_EAR = 0.4
"""Seconds between two looks for a cause, in worlds of up to ``_SMALL`` ranks."""
_SMALL = 1000


class Distress:
    """The line of some groups on which the first cause is written. Made alike on all ranks.

    Arguments: axes whose groups a failure closes; those of one rank are left out.
    """

    def __init__(self, axes: Iterable[Axis]) -> None:
        self._axes = list(
            {id(axis.group): axis for axis in axes if axis.group is not None}.values()
        )
        self._store: dist.Store | None = None
        self._ear = 0.0
        self.heard = ""
        """The cause, on nccl, once this rank has closed its groups for another's."""
        if self._axes:
            store = dist.distributed_c10d._get_default_store()
            times = store.add(f"kenotron-distress/{dist.get_rank()}", 1)
            self._store = dist.PrefixStore(f"kenotron-distress/{times}", store)
        if any(axis.backend == "nccl" for axis in self._axes):
            self._ear = _EAR * max(1.0, dist.get_world_size() / _SMALL)
            threading.Thread(target=_listen, args=(weakref.ref(self),), daemon=True).start()

    def call(self, cause: str) -> str:
        """Write a cause unless one stands, close the groups; the cause that came first.

        Peers that wait in one of the groups get a RuntimeError at once (gloo); on nccl their
        device goes on, with numbers that mean nothing, and ``heard`` says why.
        """
        first = cause
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # its host is gone
                first = self._store.compare_set("cause", "", cause).decode()
        if first == cause:
            time.sleep(1.5 * self._ear)  # let them end their part first
        for pulse in dict.fromkeys(axis.pulse for axis in self._axes):
            if pulse is not None:
                pulse.fail(first)
        self._close()
        return first

    def listen(self) -> None:
        """Look once whether another rank has called; if so close the groups."""
        if self._store is not None and self._store.check(["cause"]):
            cause = self._store.get("cause").decode()
            self._close()
            self.heard = cause

    def _close(self) -> None:
        for axis in self._axes:
            _close(axis)


def _listen(weak: weakref.ref[Distress]) -> None:
    """Body of the thread that listens as long as somebody holds the line."""
    while (line := weak()) is not None and not line.heard:
        ear = line._ear
        with contextlib.suppress(RuntimeError):  # the store's host is gone, and soon this rank too
            line.listen()
        del line
        time.sleep(ear)


def _close(axis: Axis) -> None:
    """End every connection of the axis' group, also where others still refer to it."""
    group = axis.group
    assert group is not None
    if axis.backend != "gloo":
        with contextlib.suppress(RuntimeError):  # aborted before
            group.abort()
        return
    for peer in axis.ranks:
        if peer == axis.ranks[axis.rank]:
            continue
        with contextlib.suppress(RuntimeError):  # the timeout, or that this peer has closed
            work = dist.irecv(torch.zeros(1), peer, group=group, tag=_NEVER)
            if work is not None:
                work.wait(timedelta(milliseconds=1))  # a timeout closes the pairs with all peers
