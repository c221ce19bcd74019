"""Messages between ranks through a store, for background work, which must not communicate.

A collective from a second thread would mix with those of the training. These go over the store that
the ranks met at, through a connection of their own; no rank waits for a note unless it asks.
"""

from __future__ import annotations

import base64
import json
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from kenotron_dist.launch import signing_key
from kenotron_dist.mesh import Mesh
from kenotron_dist.signed_store import (
    LARGEST_MESSAGE,
    MessageRefused,
    SignedStore,
    own_connection,
    poll,
)

_LONGEST = 0.05
"""The longest pause between two looks for a note, in seconds; longer where many ranks look."""
_LARGEST_NOTE = 8 * LARGEST_MESSAGE
"""Bytes of JSON in a note; no more are decompressed."""
_MANY = 5000
"""So many ranks make the longest pause a second longer."""
_REPAIR_SECONDS = 2.0
"""Interval at which a rank checks that its notes still stand, up to ``_SMALL`` ranks."""
_SMALL = 1000
_KEPT_SECONDS = 60.0
"""For so long after the last note they are looked after, even where nothing refers to them."""


class StoreMessages:
    """Messages that all ranks of a mesh write and read. Made on all ranks, in the same order.

    It may be used from any thread. Values are JSON; tuples come back as lists, keys as strings.
    A note that a stranger at the store overwrites or erases is written again by its rank.
    """

    def __init__(self, mesh: Mesh, name: str) -> None:
        self._ranks, self._ended = mesh.world.size, mesh.pulse.ended
        self._own: dict[str, str] = {}
        self._store: SignedStore | None = None
        self._lock = threading.Lock()  # no note is repaired while it is erased
        self._latest = 0.0
        self._keeper: threading.Thread | None = None
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
            if self._store is not None:
                self._store.set(key, data)
            self._own[key] = data
            self._latest = time.monotonic()
            if self._store is not None and self._keeper is None:
                own = weakref.ref(self), self._ended
                self._keeper = threading.Thread(
                    target=_look_after, args=own, name="notes", daemon=True
                )
                self._keeper.start()

    def read(self, key: str) -> Any:
        """Return a note; None while there is none that a rank of this job has signed.

        Raises:
            MessageRefused: it is malformed or too large.
            RuntimeError: the store is gone.
        """
        data = self._own.get(key) if self._store is None else self._store.find(key)
        return None if data is None else _unpacked(key, data)

    def erase(self, key: str) -> None:
        """Take a note of this rank away, if it is there."""
        with self._lock:
            self._own.pop(key, None)
            if self._store is not None:
                self._store.delete_key(key)

    def wait(self, key: str, given_up: Callable[[], bool] = lambda: False) -> Any:
        """Return a note, once it is there; None when ``given_up`` returns True before.

        The thread that calls sleeps between its looks, longer and longer.

        Raises:
            MessageRefused: as ``read``; or an unsigned message was found under this key, and the
                note did not come within a minute.
        """
        longest = _LONGEST + self._ranks / _MANY
        if self._store is None:
            data = poll(lambda: self._own.get(key), given_up, longest)
        else:
            data = self._store.wait(key, given_up, longest)
        return None if data is None else _unpacked(key, data)

    def _repair(self) -> None:
        """Write those notes of this rank again that stand in the store no longer."""
        store = self._store
        assert store is not None
        for key in list(self._own):
            with self._lock:
                data = self._own.get(key)
                if data is not None and store.find(key) != data.encode():
                    store.set(key, data)


def _look_after(weak: weakref.ref[StoreMessages], ended: threading.Event) -> None:
    """Body of the thread that repairs notes as long as they are in use, or new.

    It ends with the mesh: then no rank reads them.
    """
    while not ended.is_set() and (notes := weak()) is not None:
        try:
            notes._repair()
        except RuntimeError:  # the store is gone
            return
        pause = _REPAIR_SECONDS * max(1.0, notes._ranks / _SMALL)
        if time.monotonic() > notes._latest + _KEPT_SECONDS:
            del notes
        ended.wait(pause)


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
