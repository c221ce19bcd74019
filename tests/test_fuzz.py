"""A few random trainings of the day against one process, and how a failing one is made small."""

from __future__ import annotations

import datetime
import itertools
import json
from dataclasses import replace
from pathlib import Path

import fuzz
import grid_check
import grid_run
import numpy as np
import pytest
from fuzz import Draw
from grid import Row
from grid_run import Measured

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
    assert {draw.in_mode for draw in first} == {True, False}
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


def numbers(norm: float, *layers: list[float]) -> Measured:
    """Of a run with a gradient in each layer."""
    gradients = {f"layers.{n}.D": np.array(layer) for n, layer in enumerate(layers)}
    return Measured([norm], [norm], [0.1], 1.0, {}, gradients, {"optimizer.master.w": np.ones(1)})


def test_a_few_elements_that_one_process_rounds_well_by_chance_are_held_against_their_kind() -> (
    None
):
    exact = numbers(1.0, [1.0, 2.0], [10.0, 20.0])
    exact.last["optimizer.master.w"][0] = 2.0
    want = numbers(1.01, [1.0001, 2.0], [10.5, 20.0])
    off = {"layers.0.D": [1.03, 2.0], "layers.1.D": [10.2, 20.0]}
    got = numbers(1.01, *off.values())
    assert not grid_check.departures(got, want, exact)
    got = numbers(1.01, [1.3, 2.0], off["layers.1.D"])
    (fault,) = grid_check.departures(got, want, exact)
    assert fault.startswith("gradient of layers.0.D: ")


def test_a_training_may_agree_with_one_process_in_its_own_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding chooses between two experts that are nearly equal."""
    chosen = {1: 5.0, 3: 5.001}

    def measure(row: Row, *_: object, **__: object) -> Measured:
        return numbers(chosen[row.micro], [1.0])

    monkeypatch.setattr(grid_run, "measure", measure)
    assert not fuzz.faults(Draw(Row(sizes=(1, 2, 1), micro=1)), tmp_path)
    monkeypatch.setattr(
        grid_run, "measure", lambda row, *_, **__: numbers(5.0 + (row.ranks == 2), [1.0])
    )
    found = fuzz.faults(Draw(Row(sizes=(1, 2, 1), micro=1)), tmp_path)
    assert {fault.split(": ")[-2] for fault in found} == {"loss", "norm"}


def test_a_token_that_chose_another_expert_is_found(tmp_path: Path) -> None:
    lines = [
        json.dumps({"step": step, "experts": {"layer_1": {"entropy": 0.9 + step / 100}}})
        for step in (1, 2, 3)
    ]
    for run, kept in {"one": lines, "again": lines[1:], "dense": ['{"step": 1}']}.items():
        (tmp_path / run).mkdir()
        (tmp_path / run / "metrics.jsonl").write_text("\n".join(kept))
    one = tmp_path / "one"
    assert not fuzz.other_choices(one, tmp_path / "again")
    assert not fuzz.other_choices(one, tmp_path / "none")
    assert not fuzz.other_choices(tmp_path / "dense", tmp_path / "dense")
    (tmp_path / "again/metrics.jsonl").write_text(lines[1].replace("0.92", "0.91"))
    assert fuzz.other_choices(one, tmp_path / "again")
