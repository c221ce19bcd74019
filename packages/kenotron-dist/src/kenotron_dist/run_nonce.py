"""A key for one start of a job: messages of another start or job with the same secret do not count.

Every rank sends rank 0 a challenge; rank 0 answers with the nonce of this start, signed together
with the challenge. An answer that was recorded in another start answers another challenge.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable

import torch.distributed as dist

from kenotron_dist.environment import World
from kenotron_dist.signed_store import SignedStore, own_connection

_BYTES = 16


def fresh_key(world: World, store: dist.Store, key: str, seconds: float) -> str:
    """Return a key of this start alone, the same on all ranks. Collective.

    Args:
        world: which rank this is, of how many.
        store: the store that they share.
        key: what signs messages until now.
        seconds: how long a rank may take to send its challenge or answer.

    Raises:
        ConnectionError: no signed message of a rank came within ``seconds``, or it answers another
            challenge.
    """
    signed = SignedStore(own_connection(store), "kenotron-nonce", key.encode())
    if world.rank == 0:
        nonce = secrets.token_hex(_BYTES)
        for rank in range(1, world.world_size):
            challenge = _wait(signed, f"challenge/{rank}", rank, seconds)
            signed.set(f"answer/{rank}", f"{challenge} {nonce}")
    else:
        own = secrets.token_hex(_BYTES)
        signed.set(f"challenge/{world.rank}", own)
        answered, _, nonce = _wait(signed, f"answer/{world.rank}", 0, seconds).partition(" ")
        if answered != own:
            raise ConnectionError(
                f"rank {world.rank}: the answer of rank 0 in the store is that of another start: "
                "see who can reach the store's port, and that no other job uses it"
            )
    return hmac.digest(key.encode(), nonce.encode(), "sha256").hex()


def _wait(signed: SignedStore, key: str, rank: int, seconds: float) -> str:
    found = signed.wait(key, _after(seconds))
    if found is None:
        raise ConnectionError(
            f"rank {rank} has written no signed {key.partition('/')[0]} into the store within "
            f"{seconds:g} s: see what it does, and who can reach the store's port"
        )
    return found.decode()


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end
