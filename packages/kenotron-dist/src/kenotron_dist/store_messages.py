"""Messages between ranks through a store, for background work, which must not communicate.

A collective from a second thread would mix with those of the training. Notes go over the store
that the ranks met at, through a connection of their own; no rank waits for a note unless it asks.
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

from kenotron_dist.launch import signing_key
from kenotron_dist.mesh import Mesh
from kenotron_dist.signed_store import LARGEST_MESSAGE, MessageRefused, SignedStore, own_connection

_SHORTEST, _LONGEST = 0.002, 0.05
"""Pauses between two looks for a note, in seconds; longer where many ranks look."""
_LARGEST_NOTE = 8 * LARGEST_MESSAGE
"""Bytes of JSON in a note; no more are decompressed."""
_MANY = 5000
"""So many ranks make the longest pause a second longer."""


class Notes:
    """Messages that all ranks of a mesh write and read. Made on all ranks, in the same order.

    It may be used from any thread. Values are JSON; tuples come back as lists, keys as strings.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._ranks = mesh.world.size
        self._own: dict[str, str | bytes] = {}
        self._store: SignedStore | None = None
        self._lock = threading.Lock()  # a store's connection serves one caller at a time
        if mesh.world.size > 1:
            store = dist.distributed_c10d._get_default_store()
            times = store.add(f"kenotron-notes/{name}/{mesh.rank}", 1)
            prefix = f"kenotron-notes/{name}/{times}"
            self._store = SignedStore(own_connection(store), prefix, signing_key())

    def post(self, key: str, value: Any) -> None:
        """Leave a note.

        Raises:
            TypeError: it is not JSON.
            ValueError: it has more bytes than ranks read.
            RuntimeError: the store is gone.
        """
        text = json.dumps(value).encode()
        if len(text) > _LARGEST_NOTE:
            raise ValueError(
                f"note {key} has {len(text)} bytes of JSON; ranks read at most {_LARGEST_NOTE}: "
                "leave several notes"
            )
        data = base64.b85encode(zlib.compress(text, 1)).decode()
        with self._lock:
            if self._store is None:
                self._own[key] = data
            else:
                self._store.set(key, data)

    def read(self, key: str) -> Any:
        """Return a note; None while there is none.

        Raises:
            MessageRefused: it was not written by a rank of this job, or is malformed or too large.
            RuntimeError: the store is gone.
        """
        with self._lock:
            if self._store is None:
                data = self._own.get(key)
            else:
                data = self._store.get(key) if self._store.check([key]) else None
        return None if data is None else _unpacked(key, data)

    def erase(self, key: str) -> None:
        """Take a note of this rank away, if it is there."""
        with self._lock:
            if self._store is None:
                self._own.pop(key, None)
            else:
                self._store.delete_key(key)

    def wait(self, key: str, given_up: Callable[[], bool] = lambda: False) -> Any:
        """A note, once it is there; None when ``given_up`` returns True before.

        The thread that calls sleeps between its looks, longer and longer.
        """
        pause, longest = _SHORTEST, _LONGEST + self._ranks / _MANY
        while (value := self.read(key)) is None and not given_up():
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return value


def _unpacked(key: str, data: str | bytes) -> Any:
    """Undo what ``post`` did, within ``_LARGEST_NOTE`` bytes."""
    unzip = zlib.decompressobj()
    try:
        text = unzip.decompress(base64.b85decode(data), _LARGEST_NOTE)
        if unzip.unconsumed_tail:
            raise ValueError(f"it has more than {_LARGEST_NOTE} bytes")
        return json.loads(text)
    except (ValueError, RecursionError, zlib.error) as error:
        raise MessageRefused(f"note {key} in the store is malformed ({error})") from error
