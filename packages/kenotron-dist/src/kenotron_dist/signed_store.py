"""Messages between ranks in the store, signed with the secret of the job (HMAC-SHA256).

The store listens on the network and asks no client who it is. A message that is not signed with
the key of this start is ignored, before anything in it is read, and named in one warning. The
names of the keys follow from that key, too: a stranger cannot write them in advance. Ranks without
a secret use an empty key, which protects against accidents only.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
import warnings
from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

LARGEST_MESSAGE = 64 << 20
"""Bytes of a message in the store; a larger one is neither written nor read."""
LOST_SECONDS = 60.0
"""A message under whose key an unsigned one was seen is waited for no longer."""
Found = TypeVar("Found")
_ABSENT = secrets.token_hex()
"""Value that the store returns for a key that it does not have: the expected one."""
_SIGNATURE = 64
"""Hexadecimal digits of a signature."""
_TRIES = 20
"""Attempts to replace an unsigned message."""
_SHORTEST, _LONGEST = 0.002, 0.05
"""Pauses between two looks for a message, in seconds."""


def own_connection(store: dist.Store) -> dist.Store:
    """Return the store over a connection that serves its caller alone, where it has connections."""
    clone = getattr(store, "clone", lambda: store)  # missing in torch's stubs
    return clone()


def poll(
    look: Callable[[], Found | None], given_up: Callable[[], bool], longest: float
) -> Found | None:
    """Return what ``look`` returns, once it is not None; None when ``given_up`` is True before.

    The calling thread sleeps between its looks, longer and longer, up to ``longest`` seconds.
    """
    pause = _SHORTEST
    while (found := look()) is None and not given_up():
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return found


class MessageRefused(RuntimeError):
    """A message is malformed, or only unsigned ones came in the place of one that was awaited."""


class SignedStore:
    """Part of a store whose values carry a signature over their name, key and content.

    It may be used from any thread. Methods raise RuntimeError when the store is gone. The first
    unsigned message that is found is named in a RuntimeWarning.

    Args:
        store: the store that all ranks share.
        name: prefix of all keys; a message cannot be moved to another prefix or key.
        key: signs messages, the same on all ranks (``launch.signing_key``).
    """

    def __init__(self, store: dist.Store, name: str, key: bytes) -> None:
        tag = f"/{hmac.digest(key, name.encode(), 'sha256').hex()[:32]}" if key else ""
        self._store, self._name, self._key = dist.PrefixStore(name + tag, store), name, key
        self._lock = threading.RLock()  # a store's connection serves one caller at a time
        self.refused: dict[str, str] = {}
        """The keys under which an unsigned message was found, and why it was refused."""

    def set(self, key: str, text: str | bytes) -> None:
        """Write a signed message. Raises ValueError for more than ``LARGEST_MESSAGE`` bytes."""
        sealed = self._seal(key, text)
        with self._lock:
            self._store.set(key, sealed)

    def find(self, key: str) -> bytes | None:
        """Return a message; None while there is none that a rank of this job has signed."""
        with self._lock:  # ``get`` would wait for a message that was just erased
            found = self._store.compare_set(key, _ABSENT, _ABSENT)
        return self._open(key, b"" if found == _ABSENT.encode() else found)

    def wait(
        self,
        key: str,
        given_up: Callable[[], bool] = lambda: False,
        longest: float = _LONGEST,
    ) -> bytes | None:
        """Return a message, once it is there; None when ``given_up`` returns True before.

        The calling thread sleeps between its looks, longer and longer, up to ``longest`` seconds.

        Raises:
            MessageRefused: an unsigned message was found there, and no signed one came within
                ``LOST_SECONDS``.
        """
        end = float("inf")

        def look() -> bytes | None:
            nonlocal end
            found = self.find(key)
            if found is None and key in self.refused:
                end = min(end, time.monotonic() + LOST_SECONDS)
                if time.monotonic() >= end:
                    raise MessageRefused(
                        f"{self.refused[key]}; no signed message came in its place within "
                        f"{LOST_SECONDS:g} s"
                    )
            return found

        return poll(look, given_up, longest)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if ``expected`` stands there; return what stands there afterwards.

        An empty ``expected`` means no message, an empty ``desired`` erases it. An unsigned message
        counts as none.
        """
        old, new = (self._seal(key, text) if text else "" for text in (expected, desired))
        with self._lock:
            return self._compare_set(key, old, new) or b""

    def _compare_set(self, key: str, old: str, new: str) -> bytes | None:
        found = self._store.compare_set(key, old, new)
        for _ in range(_TRIES):  # replace what is unsigned, in competition with other ranks
            if (stands := self._open(key, found)) is not None or not found or old:
                return stands
            found = self._store.compare_set(key, cast(str, found), new)  # any bytes are taken
        self._store.set(key, new)
        return self._open(key, new.encode())

    def has(self, key: str) -> bool:
        """Return whether a signed message is there."""
        return self.find(key) is not None

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        with self._lock:
            return self._store.delete_key(key)

    def _seal(self, key: str, text: str | bytes) -> str:
        text = text.decode() if isinstance(text, bytes) else text
        data = text.encode()
        if len(data) > LARGEST_MESSAGE:
            raise ValueError(
                f"message {self._name}/{key} has {len(data)} bytes; ranks read at most "
                f"{LARGEST_MESSAGE}: split it"
            )
        return self._signature(key, data).decode() + text

    def _open(self, key: str, found: bytes) -> bytes | None:
        """Return the content of a signed message; None for an erased or an unsigned one."""
        where, data = f"message {self._name}/{key} in the store", found[_SIGNATURE:]
        if not found:
            return None
        if len(data) > LARGEST_MESSAGE:
            self._refuse(
                key,
                f"{where} has {len(found)} bytes, more than the {LARGEST_MESSAGE} that a rank "
                "writes: it is ignored; see who can reach the store's port",
            )
            return None
        if not hmac.compare_digest(found[:_SIGNATURE], self._signature(key, data)):
            self._refuse(
                key,
                f"{where} is not signed by a rank of this start of the job: it is ignored; see who "
                "can reach the store's port, and that no other job uses it",
            )
            return None
        return data

    def _refuse(self, key: str, why: str) -> None:
        first = not self.refused
        self.refused.setdefault(key, why)
        if first:
            warnings.warn(why, RuntimeWarning, stacklevel=4)

    def _signature(self, key: str, data: bytes) -> bytes:
        head = f"{self._name}\0{key}\0".encode()
        return hmac.digest(self._key, head + data, "sha256").hex().encode()
