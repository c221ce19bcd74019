"""How a rank that fails tells its peers: the cause in the store, then closed connections.

A rank that waits for it in gloo can be freed in no other way: no call interrupts a receive, but it
ends when the peer closes. The groups are of no use afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from kenotron_dist.mesh import Axis

_NEVER = (1 << 30) + 77
"""A tag that nobody sends with."""


class Distress:
    """The line of some groups on which the first cause is written. Made alike on all ranks.

    Arguments: axes whose groups a failure closes; those of one rank are left out.
    """

    def __init__(self, axes: Iterable[Axis]) -> None:
        self._axes = list(
            {id(axis.group): axis for axis in axes if axis.group is not None}.values()
        )
        self._store: dist.Store | None = None
        if self._axes:
            store = dist.distributed_c10d._get_default_store()
            times = store.add(f"kenotron-distress/{dist.get_rank()}", 1)
            self._store = dist.PrefixStore(f"kenotron-distress/{times}", store)

    def call(self, cause: str) -> str:
        """Write a cause unless one stands, close the groups; the cause that came first.

        Peers that wait in one of the groups get a RuntimeError at once (gloo), or when their
        backend notices (nccl).
        """
        first = cause
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # its host is gone
                first = self._store.compare_set("cause", "", cause).decode()
        for axis in self._axes:
            _close(axis)
        return first


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
