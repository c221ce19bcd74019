"""Messages between ranks in the store, signed with the secret of the job (HMAC-SHA256).

The store listens on the network and asks no client who it is. A message that is not signed with
the job's secret is refused before anything in it is read. Ranks without a secret use an empty one,
which protects against accidents only.
"""

from __future__ import annotations

import hmac

import torch.distributed as dist

LARGEST_MESSAGE = 64 << 20
"""Bytes of a message in the store; a larger one is neither written nor read."""
_SIGNATURE = 64
"""Hexadecimal digits of a signature."""


def own_connection(store: dist.Store) -> dist.Store:
    """Return the store over a connection that serves its caller alone, where it has connections."""
    clone = getattr(store, "clone", lambda: store)  # missing in torch's stubs
    return clone()


class MessageRefused(RuntimeError):
    """A message in the store is not signed with the job's secret, or is malformed or too large."""


class SignedStore:
    """Part of a store whose values carry a signature over their name, key and content.

    Args:
        store: the store that all ranks share.
        name: prefix of all keys; a message cannot be moved to another prefix or key.
        key: what signs messages, the same on all ranks (``launch.signing_key``).

    Methods raise RuntimeError when the store is gone.
    """

    def __init__(self, store: dist.Store, name: str, key: bytes) -> None:
        self._store, self._name, self._key = dist.PrefixStore(name, store), name, key

    def set(self, key: str, text: str | bytes) -> None:
        """Write a signed message. Raises ValueError for more than ``LARGEST_MESSAGE`` bytes."""
        self._store.set(key, self._seal(key, text))

    def get(self, key: str, *, may_be_erased: bool = False) -> bytes:
        """Read a message, once it is there.

        Args:
            key: where it is.
            may_be_erased: whether ``compare_set`` with an empty text may have erased it.

        Raises:
            MessageRefused: it was not written by a rank of this job.
        """
        found = self._store.get(key)
        return b"" if may_be_erased and not found else self._open(key, found)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write ``desired`` if ``expected`` stands there; return what stands there afterwards.

        An empty ``expected`` means no message, an empty ``desired`` erases it.
        Raises MessageRefused as ``get`` does.
        """
        texts = [self._seal(key, text) if text else "" for text in (expected, desired)]
        found = self._store.compare_set(key, *texts)
        return self._open(key, found) if found else b""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
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

    def _open(self, key: str, found: bytes) -> bytes:
        where = f"message {self._name}/{key} in the store"
        if len(found) > LARGEST_MESSAGE + _SIGNATURE:
            raise MessageRefused(
                f"{where} has {len(found)} bytes, more than the {LARGEST_MESSAGE} that a rank "
                "writes: it is refused; see who can reach the store's port"
            )
        data = found[_SIGNATURE:]
        if not hmac.compare_digest(found[:_SIGNATURE], self._signature(key, data)):
            raise MessageRefused(
                f"{where} is not signed with this job's secret: it is refused; see who can reach "
                "the store's port, and that no other job uses it"
            )
        return data

    def _signature(self, key: str, data: bytes) -> bytes:
        head = f"{self._name}\0{key}\0".encode()
        return hmac.digest(self._key, head + data, "sha256").hex().encode()
