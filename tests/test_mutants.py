"""The list of planted bugs fits the code, and every one of them was caught when it was last run."""

from __future__ import annotations

import re

import grid_table
import mutants
import pytest


@pytest.mark.parametrize("mutant", mutants.mutants(), ids=lambda mutant: mutant.name)
def test_a_bug_can_be_planted(mutant: mutants.Mutant) -> None:
    assert not mutants.problems(mutant)


def test_there_are_enough_and_half_were_chosen_by_somebody_else() -> None:
    chosen = [mutant.chosen_by for mutant in mutants.mutants()]
    assert len(chosen) >= 20
    assert set(chosen) == {"author", "stranger"}
    assert 2 * chosen.count("stranger") >= len(chosen)


def test_the_table_has_every_bug_and_who_caught_it() -> None:
    rows = re.findall(r"^\| ([^|]+) \|.*\| ([^|]+) \| [^|]* \|$", grid_table.read("mutants"), re.M)
    caught = dict(rows[1:])  # below the head
    assert {mutant.name for mutant in mutants.mutants()} == caught.keys()
    assert mutants.NOBODY not in caught.values()


def test_a_run_of_some_bugs_keeps_the_line_of_the_run_of_all() -> None:
    made = "2026-01-02, commit abc1234, gloo."
    once = mutants.header(f"\n{made}\n\n2 of 2 are caught.\n", ["scaled by exp(a - b)", "b"], "c1")
    assert once == f"{made}\nRun later: scaled by exp(a - b) (c1); b (c1)."
    twice = mutants.header(f"\n{once}\n\n2 of 2 are caught.\n", ["b", "d"], "c2-dirty")
    assert twice == f"{made}\nRun later: scaled by exp(a - b) (c1); b (c2-dirty); d (c2-dirty)."
