"""The program: ``python apps/train``, ``torchrun apps/train``, and ``kenotron-train``."""

from typing import NoReturn

from kenotron_dist import shutdown
from kenotron_train.cli import main


def program() -> NoReturn:
    """Run the command line and end this process as a rank must: see ``shutdown``."""
    try:
        raise SystemExit(main())
    finally:
        shutdown()
