"""The hook of apps/train that finds where its step waits for the device; it needs pydantic."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from gpu_waiting import synchronisations

from kenotron_train import LifeCycle

WARM = 2
"""Steps before the one that is watched."""


class Watcher(LifeCycle):
    """Counts between the end of one step and the end of the next, and writes to a file.

    Args:
        file: gets a JSON object: line -> how often.
        device: ``cuda``, where torch is asked to warn, or ``cpu``.
    """

    def __init__(self, file: str, device: str) -> None:
        self.file, self.device = file, device
        self.steps, self.stack = 0, ExitStack()

    def post_train_step(self, *_: object) -> None:
        """Begin after the warm steps, write after the next one."""
        self.steps += 1
        if self.steps == WARM:
            self.found = self.stack.enter_context(synchronisations())
            self.warn("warn")
        elif self.steps == WARM + 1:
            self.warn("default")
            self.stack.close()
            Path(self.file).write_text(json.dumps(dict(self.found.most_common())))

    def warn(self, mode: str) -> None:
        """Let torch warn of operations that wait, or not."""
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode(mode)
