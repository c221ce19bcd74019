"""The process in which tests run programs, so that torch is loaded once."""

from __future__ import annotations

import os

import pytest
import warm


def test_it_is_not_for_a_test_that_has_changed_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = warm.shared()
    assert worker is not None and worker.is_alive()
    monkeypatch.setenv("KENOTRON_TEST", "1")
    assert warm.shared() is None
    monkeypatch.delenv("KENOTRON_TEST")
    assert warm.shared() is worker


def test_what_a_test_leaves_in_the_environment_goes() -> None:
    path = os.environ["PATH"]
    os.environ |= {"KENOTRON_TEST": "1", "PATH": "/nowhere"}
    assert warm.shared() is None
    warm.restore()
    assert warm.shared() is not None
    assert "KENOTRON_TEST" not in os.environ and os.environ["PATH"] == path
