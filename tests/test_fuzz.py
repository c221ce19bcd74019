"""A few random trainings of the day against one process, and how a failing one is made small."""

from __future__ import annotations

import datetime
import itertools
from dataclasses import replace
from pathlib import Path

import fuzz
import grid_run
import pytest
from fuzz import Draw
from grid import Row

COUNT = 4


@pytest.mark.parametrize("number", range(COUNT))
def test_a_training_of_the_day_agrees_with_one_process(number: int, tmp_path: Path) -> None:
    """The seed is that of ``python tests/fuzz.py`` on this day."""
    seed = datetime.date.today().toordinal()
    grid_run.write_documents(tmp_path)
    draw = next(itertools.islice(fuzz.draws(seed, tmp_path), number, None))
    found = fuzz.faults(draw, tmp_path)
    assert not found, f"seed {seed}, number {number}: {draw}: " + "; ".join(found)


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    first, again = (list(itertools.islice(fuzz.draws(7, tmp_path), 12)) for _ in range(2))
    assert first == again and len(set(map(str, first))) == 12
    assert all(draw.row.ranks <= fuzz.MOST_RANKS for draw in first)
    assert {draw.row.ep for draw in first if "moe" not in draw.row.arch} <= {1, 2}


def test_what_a_config_refuses_is_drawn_again_and_other_errors_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fuzz.accepted(Draw(Row(sizes=(1, 2, 1))), tmp_path)
    wrong = Draw(Row(sizes=(1, 2, 1)), ways={"optimizer.regather": "step"})  # of stage 1
    assert not fuzz.accepted(wrong, tmp_path)

    def broken(*_: object, **__: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(grid_run, "configure", broken)
    with pytest.raises(KeyError):
        fuzz.accepted(wrong, tmp_path)


def test_a_failing_training_is_made_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faults(draw: Draw, folder: Path) -> list[str]:
        return ["departs"] * (draw.row.zero == 3 and "optimizer.offload" in draw.ways)

    monkeypatch.setattr(fuzz, "faults", faults)
    large = Draw(
        Row(sizes=(2, 2, 1), engine="zb-h1", zero=3, tied=True, arch="qwen3", layers=6),
        {"optimizer.optimizer_factory": "{name: muon}"},
        {"optimizer.offload": "true", "optimizer.regather": "step"},
        ("verify", "export"),
    )
    least = fuzz.shrunk(large, tmp_path)
    assert least == Draw(Row(zero=3), ways={"optimizer.offload": "true"})
    assert str(least) == "Draw(Row(**{'zero': 3}), {}, {'optimizer.offload': 'true'}, ())"
    assert fuzz.shrunk(large, tmp_path, tries=0) == large
    assert fuzz.shrunk(replace(large, programs=()), tmp_path, tries=1) != large
