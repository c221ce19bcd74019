"""The command line of torchrun, read by torch's own parser."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def torchrun_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return what a command line of torchrun asks for, by torch's names (``nnodes``).

    Args:
        words: of the whole command, as ``/proc`` has it.

    Raises:
        ValueError: it is another command.
    """
    from torch.distributed.run import get_args_parser

    for place, word in enumerate(words):
        if word == "torch.distributed.run" or Path(word).name == "torchrun":
            with contextlib.suppress(SystemExit):
                return vars(get_args_parser().parse_args(words[place + 1 :]))
    raise ValueError(f"{' '.join(words[:3])} is not torchrun")
