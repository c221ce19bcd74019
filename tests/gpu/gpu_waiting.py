"""Which Python lines wait for the device."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def synchronisations() -> Iterator[Counter[str]]:
    """Count the Python lines that wait for the device while the context is open.

    torch warns of copies and reads that wait; explicit calls are counted here.
    """
    found: Counter[str] = Counter()
    before = torch.cuda.synchronize, torch.accelerator.synchronize, warnings.showwarning

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found[f"{calling_line()} (explicit)"] += 1
            return call(*args, **kwargs)

        return run

    def show(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if "synchroniz" in str(message):
            found[calling_line() or f"{filename}:{lineno}"] += 1

    torch.cuda.synchronize, torch.accelerator.synchronize = map(counted, before[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        try:
            yield found
        finally:
            torch.cuda.synchronize, torch.accelerator.synchronize = before[:2]


def calling_line() -> str:
    """Return the innermost line of the packages on this thread's stack; empty without one."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "/src/kenotron_" in frame.filename or "/apps/" in frame.filename:
            return f"{path.parent.name}/{path.name}:{frame.lineno} in {frame.name}"
    return ""
