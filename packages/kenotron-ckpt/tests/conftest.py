"""What several of the test files use."""

import threading
import time

import pytest

import kenotron_ckpt.job


@pytest.fixture
def slow(monkeypatch):
    """Every file takes 50 ms; the gate holds them all back when it is shut."""
    real, gate = kenotron_ckpt.job.write_part, threading.Event()
    gate.set()

    def write(*arguments):
        gate.wait()
        time.sleep(0.05)
        return real(*arguments)

    monkeypatch.setattr(kenotron_ckpt.job, "write_part", write)
    yield gate
    gate.set()
