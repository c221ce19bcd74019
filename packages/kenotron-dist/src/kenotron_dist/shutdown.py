"""The end of a rank: out of the world, and out of the process."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from typing import NoReturn

import torch.distributed as dist

from kenotron_dist.exit_process import exit_code, leave

_FAREWELL_SECONDS = 10.0
"""Time that a rank that is done waits for the others to be done too."""


def shutdown(code: int = 0) -> NoReturn:
    """Leave the world and end this process with ``code``: the one way out for every program.

    In a ``finally`` it sees the exception that is on its way: it writes the traceback, and a code
    of 0 becomes 1 (or that of a SystemExit).

    A rank that succeeded first waits up to 10 seconds until all are done, for the last messages
    and the store must outlive their readers. The process then ends without Python's finalisation,
    in which gloo aborts: close files and trackers before; ``atexit`` functions do not run. A
    process that joined no world (it spawned its ranks) ends by SystemExit, the usual way.
    """
    code = code or exit_code(sys.exc_info()[1])
    if not (dist.is_available() and dist.is_initialized()):
        raise SystemExit(code)  # no backend thread to fear, and finalisers clean up
    if code == 0 and dist.get_world_size() > 1:
        _farewell(dist.get_world_size())
    with contextlib.suppress(RuntimeError):  # a group that has failed
        dist.destroy_process_group()
    gc.collect()
    leave(code)


def _farewell(size: int) -> None:
    end = time.monotonic() + _FAREWELL_SECONDS
    with contextlib.suppress(RuntimeError):  # its host is gone: then all are done
        store = dist.distributed_c10d._get_default_store()
        done = store.add("kenotron-farewell", 1)
        while done < size and time.monotonic() < end:
            time.sleep(0.02)
            done = store.add("kenotron-farewell", 0)
