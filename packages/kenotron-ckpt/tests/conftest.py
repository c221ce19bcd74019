"""What several of the test files use."""

import threading
import time

import pytest

import kenotron_ckpt.snapshot_files
from kenotron_dist import spawn


@pytest.fixture(scope="session", autouse=True)
def ranks_share_what_they_load():
    """The first spawn of a process decides what the ranks of all spawns find loaded."""
    spawn(id, preload=("kenotron_ckpt", "hypothesis", "pytest"))


@pytest.fixture
def slow(monkeypatch):
    """Every file takes 50 ms; the gate holds them all back when it is shut."""
    real, gate = kenotron_ckpt.snapshot_files.write_part, threading.Event()
    gate.set()

    def write(*arguments):
        gate.wait()
        time.sleep(0.05)
        return real(*arguments)

    monkeypatch.setattr(kenotron_ckpt.snapshot_files, "write_part", write)
    yield gate
    gate.set()
