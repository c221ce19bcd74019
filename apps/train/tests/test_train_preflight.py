"""The machines of a run are measured, and what is slow is named."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import runs

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_train.preflight import measures
from kenotron_train.preflight.measures import RankRates, rates_of_all
from kenotron_train.preflight.odd_ranks import UNITS, odd_ranks

EVEN = [
    RankRates(rank=rank, host=f"h{rank // 2}", products=2.0, memory=20.0, disk=disk, link=1.0)
    for rank, disk in enumerate((1.0, None, 1.1, None))
]


def test_even_ranks_are_not_named() -> None:
    assert not odd_ranks(EVEN, 1.5)
    alone = [RankRates(rank=0, host="a", products=1, memory=1, disk=1, link=None)]
    assert not odd_ranks(alone, 1.5)


@pytest.mark.parametrize("name", UNITS)
def test_a_slow_rank_is_named_and_no_other(name: str) -> None:
    slow = [replace(EVEN[0], **{name: getattr(EVEN[0], name) / 1.6}), *EVEN[1:]]
    (found,) = odd_ranks(slow, 1.5)
    where = "from rank 3 on host h1 to rank 0 on h0" if name == "link" else "rank 0 on host h0"
    assert found.startswith(f"{where}: {name} at {getattr(slow[0], name):.3g} {UNITS[name]}, the")
    assert not odd_ranks(slow, 1.8)
    two = [slow[0], EVEN[2]]  # of two the faster one is what the slower one could be
    assert len(odd_ranks(two, 1.5)) == 1


def with_a_slow_one(mesh: Mesh, folder: Path) -> list[RankRates]:
    whole = measures._fastest

    def slower(*arguments: object) -> float:
        if mesh.rank == 2:
            time.sleep(0.01)
        return whole(*arguments) * (1000 if mesh.rank == 2 else 1)  # type: ignore[arg-type]

    measures._fastest = slower  # type: ignore[assignment]
    try:
        return rates_of_all(mesh, folder, 0.1)
    finally:
        measures._fastest = whole


def test_every_rank_knows_all_rates(tmp_path: Path) -> None:
    found = on_ranks(with_a_slow_one, tmp_path, dp=3)
    assert found[0] == found[1] == found[2]
    rates = found[0]
    assert [each.rank for each in rates] == [0, 1, 2]
    assert rates[0].disk and rates[1].disk is None and rates[2].disk is None  # one host
    assert all(each.products > 0 and each.memory > 0 and each.link for each in rates)
    said = odd_ranks(rates, 100)
    assert len(said) == 2 and all(each.startswith("rank 2 on host ") for each in said)
    assert not [*tmp_path.iterdir()]


def test_the_command_measures_local_ranks(tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    flags = ["--ranks", "2", "--seconds", "0.4", "--tolerance", "1000", "--json", str(target)]
    done = runs.train(tmp_path, "preflight", *flags)
    assert done.returncode == 0, done.stderr
    assert "No rank is 1000 times slower than the others" in done.stdout
    assert done.stdout.startswith("rank  host") and len(done.stdout.splitlines()) == 4
    found = json.loads(target.read_text())
    assert len(found["ranks"]) == 2 and found["slow"] == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tolerance", "1"], "--tolerance: 1.0 was given; it must be above 1"),
        (["--seconds", "0"], "--seconds: 0.0 was given; it must be above 0"),
        (["--ranks", "none"], "'none' is no whole number from 1"),
        (["--folder", "/dev/null/x", "--seconds", "0.1"], "/dev/null/x"),
    ],
)
def test_what_cannot_be_measured_is_named(flags: list[str], sentence: str, tmp_path: Path) -> None:
    done = runs.train(tmp_path, "preflight", *flags)
    assert done.returncode == 2 and sentence in done.stderr
