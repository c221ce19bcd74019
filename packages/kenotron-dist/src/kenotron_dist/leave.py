"""How a process of a run ends without the finalisation that gloo's threads do not survive."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

STALLED = 75
"""Exit code of a process that left because of a stall (``EX_TEMPFAIL``: trying again may help)."""


def leave(code: int) -> NoReturn:
    """End this process at once, output flushed, without Python's finalisation.

    A gloo process that finalises soon after its last collective aborts in half the cases (torch
    2.13): a backend thread drops a tensor while the interpreter goes away.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
