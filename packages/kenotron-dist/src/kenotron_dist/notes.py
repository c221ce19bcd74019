"""Notes that ranks leave for one another: for work beside the training, which must not communicate.

A collective from a second thread would mix with those of the training. Notes go over the store
that the ranks met at, through a connection of their own; nobody waits for a note unless it asks.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from kenotron_dist.mesh import Mesh

_SHORTEST, _LONGEST = 0.002, 0.05
"""Pauses between two looks for a note, in seconds; longer where many ranks look."""
_MANY = 5000
"""So many ranks make the longest pause a second longer."""


class Notes:
    """A wall that all ranks of a mesh write on and read. Made alike on all ranks.

    It may be used from any thread. Values are JSON; tuples come back as lists, keys as strings.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._ranks = mesh.world.size
        self._own: dict[str, str | bytes] = {}
        self._store: dist.Store | None = None
        self._lock = threading.Lock()  # a store's connection serves one caller at a time
        if mesh.world.size > 1:
            store = dist.distributed_c10d._get_default_store()
            times = store.add(f"kenotron-notes/{name}/{mesh.rank}", 1)
            clone = getattr(store, "clone", lambda: store)  # torch's stubs do not know it
            self._store = dist.PrefixStore(f"kenotron-notes/{name}/{times}", clone())

    def post(self, key: str, value: Any) -> None:
        """Leave a note. Raises TypeError unless it is JSON, RuntimeError when the store is gone."""
        data = base64.b85encode(zlib.compress(json.dumps(value).encode(), 1)).decode()
        with self._lock:
            if self._store is None:
                self._own[key] = data
            else:
                self._store.set(key, data)

    def read(self, key: str) -> Any:
        """A note; None while there is none. Raises RuntimeError when the store is gone."""
        with self._lock:
            if self._store is None:
                data = self._own.get(key)
            else:
                data = self._store.get(key) if self._store.check([key]) else None
        return None if data is None else json.loads(zlib.decompress(base64.b85decode(data)))

    def erase(self, key: str) -> None:
        """Take a note of this rank away, if it is there."""
        with self._lock:
            if self._store is None:
                self._own.pop(key, None)
            else:
                self._store.delete_key(key)

    def wait(self, key: str, given_up: Callable[[], bool] = lambda: False) -> Any:
        """A note, once it is there; None when ``given_up`` says True before.

        The thread that calls sleeps between its looks, longer and longer.
        """
        pause, longest = _SHORTEST, _LONGEST + self._ranks / _MANY
        while (value := self.read(key)) is None and not given_up():
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return value
