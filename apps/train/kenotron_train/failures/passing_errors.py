"""Errors of files that may pass by themselves: a full disk, a file system that went away."""

from __future__ import annotations

import errno

PASSING = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO,
    errno.ENOLCK, errno.EAGAIN, errno.EINTR, errno.EPIPE, errno.ENETDOWN, errno.EHOSTDOWN,
    errno.EROFS,
)  # fmt: skip
"""Error numbers after which another start may help."""


class PassingError(OSError):
    """A file could not be written or read, and another start may help."""


def names_passing(text: str) -> bool:
    """Whether a message quotes an error of ``PASSING``, as str() of an OSError writes it.

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
