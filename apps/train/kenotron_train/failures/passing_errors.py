"""Errors that may pass by themselves: a full disk, a file system or a host that went away."""

from __future__ import annotations

import errno

from kenotron_ckpt import SaveFailed
from kenotron_dist import STALLED, RankError
from kenotron_dist.diagnosis import PeerLost

PASSING = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO,
    errno.ENOLCK, errno.EAGAIN, errno.EINTR, errno.EPIPE, errno.ENETDOWN, errno.EHOSTDOWN,
    errno.EROFS,
)  # fmt: skip
"""Error numbers after which another start may help."""


class PassingError(OSError):
    """A file could not be written or read, and another start may help."""


def names_passing(text: str) -> bool:
    """Return whether a message quotes an error of ``PASSING``, as str() of an OSError writes it.

    Ranks report unreadable files to each other as text.
    """
    return any(f"[Errno {number}] " in text for number in PASSING)


def as_passing(error: OSError) -> OSError:
    """Return the same error, as a PassingError if it, or what it was raised from, may pass."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in PASSING:
            return PassingError(str(error))
        cause = cause.__cause__
    return error


def status_of(error: Exception) -> int:
    """Return the exit status for what ended a run: ``STALLED`` where another start may help."""
    error = as_passing(error) if isinstance(error, OSError) else error
    if isinstance(error, (PeerLost, SaveFailed, PassingError)):
        return STALLED
    if isinstance(error, RankError):
        return STALLED if error.is_any(SaveFailed, PassingError) else error.code
    return 1
