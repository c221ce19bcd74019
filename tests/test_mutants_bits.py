"""Every planted bug is caught by one step's bits, or something says why it cannot be."""

from __future__ import annotations

from collections.abc import Iterator

import grid_run
import mutants
import mutants_bits
import pytest
from mutants_bits import CAUGHT, MISSED, OUTSIDE, STOPPED, Found, Steps

CASE = "tp 2, caps"
SHOWN = "padding of the vocabulary gets probability"
NOT_RUN = "the data cursor is one sample on"
BUGS = {each.name: each for each in mutants.mutants()}


@pytest.mark.parametrize("name", BUGS)
def test_one_step_shows_a_bug_or_it_is_said_why_it_cannot(name: str) -> None:
    found = mutants_bits.results().get(name)
    assert found, f"run: python tests/mutants.py --bits '{name}'"
    assert not mutants_bits.unexplained(BUGS[name], found), (
        f"{found.verdict}: extend tests/bits_layouts.py, or say in no_bits of the bug why no bit "
        "can differ"
    )


def test_no_reason_is_given_for_a_bug_that_bits_show() -> None:
    said, found = {name for name, bug in BUGS.items() if bug.no_bits}, mutants_bits.results()
    assert {name for name in said if found[name].verdict in (CAUGHT, STOPPED)} == set()


def test_a_place_is_no_reason_where_a_layout_runs_the_bug() -> None:
    bug = BUGS[NOT_RUN]
    assert not mutants_bits.unexplained(bug, Found(OUTSIDE))
    assert mutants_bits.unexplained(bug, Found(MISSED, CASE))
    assert mutants_bits.unexplained(BUGS[SHOWN], Found(OUTSIDE))


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    found = Steps(tmp_path_factory.mktemp("steps"))
    grid_run.write_documents(found.folder)
    yield found
    found.close()


def test_a_step_shows_a_bug_of_it_and_no_other(steps: Steps) -> None:
    shown, not_run = BUGS[SHOWN], BUGS[NOT_RUN]
    file = steps.tree / shown.file
    right = file.read_text()
    run = mutants_bits.lines_of_cases(steps, [CASE], [shown, not_run])
    found = mutants_bits.judge(steps, shown, run)
    assert (found.verdict, found.case) == (CAUGHT, CASE)
    assert "more" in found.said
    assert file.read_text() == right
    assert mutants_bits.judge(steps, not_run, run) == Found(OUTSIDE)
    same = mutants.Mutant(**{**vars(shown), "new": f"{shown.old}  # the same"})
    assert mutants_bits.judge(steps, same, run) == Found(MISSED, CASE)
    ends = mutants.Mutant(**{**vars(shown), "new": "raise ArithmeticError('planted')"})
    found = mutants_bits.judge(steps, ends, run)
    assert found.verdict == STOPPED
    assert "planted" in found.said
    with steps.planted(shown), pytest.raises(RuntimeError, match=f"without a bug, {CASE}"):
        mutants_bits.check(CASE, steps.compute([CASE], {}, False))


TEXT = """
LIMIT = 3


def work(x):
    if x > LIMIT:
        return [
            x + 1,
            x + 2,
        ]
    return lambda y: y + x
"""


@pytest.mark.parametrize(
    ("old", "lines"),
    [
        ("LIMIT = 3", None),
        ("x > LIMIT", {6}),
        ("x + 2", {7, 8, 9, 10}),
        ("y + x", {11}),
    ],
)
def test_lines_are_those_of_the_statements_that_change(old: str, lines: set[int] | None) -> None:
    bug = mutants.Mutant(name="", seen="", chosen_by="", file="", old=old, new="", tests=())
    assert mutants_bits.lines_of(bug, TEXT) == lines
