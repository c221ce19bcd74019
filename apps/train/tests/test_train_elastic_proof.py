"""Seeded signals at random moments change neither losses nor samples, and leave nothing behind."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import elastic_proof
import pytest
from elastic_proof import BATCH, REPRODUCIBLE, departures, prove, undisturbed


@pytest.mark.parametrize(
    ("steps", "faults", "hosts", "replaced", "more"),
    [(60, 4, 2, 0, {}), (30, 3, 1, 0, REPRODUCIBLE), (40, 4, 1, 9, REPRODUCIBLE)],
    ids=["plain", "reproducible", "replaced"],
)
def test_a_run_outlives_its_ranks(
    steps: int, faults: int, hosts: int, replaced: int, more: dict[str, Any], tmp_path: Path
) -> None:
    """The whole proof is ``nox -s elastic-proof``."""
    expected = undisturbed(tmp_path / "one", steps, **more)
    what = {"faults": faults, "hosts": hosts, "max_restarts": replaced, "seed": 3}
    proof = prove(tmp_path / "many", expected, **what, **more)
    assert not proof.problems, "\n".join(proof.problems)
    assert proof.lost == 0 and sum(proof.fired.values()) == faults
    assert sum(map(len, proof.recoveries.values())) >= faults - 1  # two may follow at once


def curve(steps: int) -> list[dict[str, Any]]:
    return [
        {
            "step": n + 1, "lm_loss": 5.0 - n / 100, "grad_norm": 1.0,
            "samples": list(range(BATCH * n, BATCH * (n + 1))),
        }
        for n in range(steps)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("samples", [7, 8, 9, 10, 11, 12, 12], r"not taken once, with counts: \{12: 2, 13: 0\}"),
        ("lm_loss", 4.99 * (1 + 2e-6), "step 2: lm_loss"),
        ("step", 3, "the steps of the disturbed run are not 1 to 3"),
    ],
)
def test_a_departure_is_named(key: str, value: object, said: str) -> None:
    expected, found = curve(3), curve(3)
    assert not departures(expected, found, 3, exact=True)
    found[1][key] = value
    assert re.search(said, "\n".join(departures(expected, found, 3, exact=False)))


def test_faults_need_room() -> None:
    with pytest.raises(ValueError, match="--steps 8: 2 faults need at least 9 steps"):
        elastic_proof.faults_of(0, 8, 2)
    for seed in range(50):
        steps = [fault.step for fault in elastic_proof.faults_of(seed, 300, 20)]
        assert all(b - a >= elastic_proof.APART for a, b in pairwise(steps))
        assert steps[0] >= 1 and steps[-1] + 2 < 300
