"""The program: ``python apps/train``, ``torchrun apps/train``, and ``kenotron-train``."""

import signal
from collections.abc import Callable
from typing import Any, NoReturn

from kenotron_dist import shutdown
from kenotron_train.cli import interrupted, main


def program(ctrl_c: Callable[..., Any] | int | None = None) -> NoReturn:
    """Run the command line and end this process as a rank must: see ``shutdown``.

    Args:
        ctrl_c: handler of SIGINT from now on; None: the one that is there.
    """
    try:
        if ctrl_c is not None:
            signal.signal(signal.SIGINT, ctrl_c)
        raise SystemExit(main())
    except KeyboardInterrupt:  # outside of a run: flags are read, a report is drawn
        raise SystemExit(interrupted()) from None
    finally:
        shutdown()
