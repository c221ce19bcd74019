"""The secret of a job: from the launcher's environment, or from a file that only its owner reads.

The file is made by the rank that looks first and removed by the rank that has read it last, so
that every start has a new secret.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import time
import warnings
from pathlib import Path

import torch.distributed as dist

from kenotron_dist.environment import World

SECRET = "KENOTRON_JOB_SECRET"
"""The variable with the secret of the job, the same on all ranks."""
_LEAST = 16
"""Characters of a secret."""
_DIGITS = 64
"""Hexadecimal digits of a secret in a file."""
_SECONDS = 10.0
"""Time that the rank that makes the file may take to write it."""


def check_secret(secret: str) -> str:
    """Return the value of the variable. Raises ValueError if it is too short to be a secret."""
    if secret and len(secret) < _LEAST:
        raise ValueError(
            f"{SECRET} has {len(secret)} characters, a secret has at least {_LEAST}: set it to the "
            "output of 'openssl rand -hex 32' on all ranks, or unset it"
        )
    return secret


def read_secret(path: Path) -> str:
    """Return the secret in a file of mode 0600, which is made if it is not there.

    Raises:
        ValueError: the file belongs to another user, can be read by others, or holds no secret.
        OSError: it cannot be made or read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(file, "w") as made:
            made.write(secrets.token_hex(_DIGITS // 2))
    end = time.monotonic() + _SECONDS
    while len(found := _read(path)) < _DIGITS and time.monotonic() < end:
        time.sleep(0.01)  # another rank is writing it
    if len(found) != _DIGITS:
        raise ValueError(
            f"{path} holds no secret of {_DIGITS} digits: remove it, a start that was interrupted "
            "may have left it"
        )
    return found


def _read(path: Path) -> str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        about = os.fstat(file.fileno())
        mode = stat.S_IMODE(about.st_mode)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or mode & 0o077:
            raise ValueError(
                f"{path} (user {about.st_uid}, mode {mode:04o}) is no secret of user "
                f"{os.geteuid()}: it must be a file of this user with mode 0600; remove it, or "
                f"set {SECRET} on all ranks"
            )
        return file.read(_DIGITS + 1)


def agree(world: World, store: dist.Store, secret: str, file: Path | None) -> None:
    """Check that all ranks have the same secret; remove the file once all have read it.

    Rank 0 warns when the ranks of several hosts have none.

    Args:
        world: which rank this is, of how many.
        store: the store that they share.
        secret: this rank's secret, empty if it has none.
        file: where it was read.

    Raises:
        ValueError: another rank has another secret.
    """
    own = derive(secret, "agreement") if secret else "none"
    first = store.compare_set("secret", "", own).decode()
    if first != own:
        has = "another secret" if secret else "no secret"
        shared = "" if file is None else f" (or let {file} be the same file on all hosts)"
        raise ValueError(
            f"rank {world.rank} has {has} of the job, unlike the rank that came first: set "
            f"{SECRET} to the same value on all ranks{shared}"
        )
    if not secret and not world.is_local and world.rank == 0:
        warnings.warn(
            f"the ranks are on several hosts and the job has no secret: anyone who can reach "
            f"{world.master_address}, port {world.master_port}, can forge messages between them; "
            f"set {SECRET} to the output of 'openssl rand -hex 32', the same on all ranks, or "
            "give secret_file, a path that all hosts share",
            RuntimeWarning,
            stacklevel=4,  # the caller of from_env
        )
    if file is not None and store.add("secret-read", 1) == world.world_size:
        file.unlink(missing_ok=True)


def derive(secret: str, use: str) -> str:
    """Return a key for one use of a secret; the secret does not follow from it."""
    return hmac.digest(secret.encode(), use.encode(), "sha256").hex()
