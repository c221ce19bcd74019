"""SIGKILL at every step of every save: the old checkpoint or the new, whole; never another."""

import shutil
from pathlib import Path

import pytest
from ckpt_checks import names_due, what_is_there
from ckpt_kills import (
    MANY,
    SCENARIOS,
    nursery,
    put,
    put_and_die,
    put_beside,
    put_together,
)

from kenotron_ckpt.folder import defect, is_verified, steps_in
from kenotron_ckpt.protocol import SaveMoment
from kenotron_dist import RankError, spawn

MANIFEST_RENAMED = ["FOLDER_SYNCED", "TEXT_OPENED", "TEXT_WRITTEN", "TEXT_RENAMED"]
"""The last of these is the moment before COMMITTED."""
PRUNING = {"pruning": 5, "two threads": None}
"""Scenario -> its ``keep_every``, where old checkpoints go."""


@pytest.fixture(scope="module")
def run():
    with nursery() as run:
        yield run


@pytest.fixture(scope="module")
def befores(tmp_path_factory):
    """Scenario -> a run folder as it is before the save."""
    root = tmp_path_factory.mktemp("before")
    made = {name: root / name for name in SCENARIOS}
    for name, folder in made.items():
        SCENARIOS[name][0](folder)
    return made


@pytest.fixture(scope="module")
def undisturbed(run, befores, tmp_path_factory):
    """Scenario -> the steps of a save that nobody kills."""
    root, steps = tmp_path_factory.mktemp("whole"), {}
    for name, before in befores.items():
        log = root / f"{name}.log"
        assert run(name, fresh(before, root / name), log) == 0
        steps[name] = log.read_text().split()
        assert what_is_there(root / name) == (
            (10, 1) if name == "full disk" else (SCENARIOS[name][2], 2)
        )
    return steps


def fresh(before, folder):
    """A copy of a run folder."""
    if before.exists():
        shutil.copytree(before, folder)
    return folder


def check_old_or_new(folder, step, seen, old):
    """What is right after a kill, from the steps that the process had come to."""
    stands = stands_after(seen)
    points = "POINTED" in seen or (
        "COMMITTED" in seen and seen[seen.index("COMMITTED") :].count("TEXT_RENAMED") > marks(seen)
    )
    there = what_is_there(folder / str(step)) if (folder / str(step)).exists() else None
    before = old if old is not None and old[0] == step else None
    assert there == ((step, 2) if stands else before)
    turned = points or (stands and (old is None or old[0] == step))
    assert what_is_there(folder) == ((step, 2) if turned else old)


def stands_after(seen):
    """Whether the new manifest has its name: that comes just before the step that says so."""
    return "COMMITTED" in seen or seen[-4:] == MANIFEST_RENAMED


def marks(seen):
    """How many texts were renamed after the commit that are not latest.txt."""
    return 1 if "SHARD_VERIFIED" in seen else 0


def check_retention(folder, before, seen, replaced):
    """The last that was verified is there, whatever was removed; what goes, goes whole.

    ``replaced`` is overwritten as soon as the new manifest stands, not before.
    """
    verified = [step for step in steps_in(before) if is_verified(before / str(step))]
    if stands_after(seen):
        verified = [step for step in verified if step != replaced]
    left = [step for step in steps_in(folder) if is_verified(folder / str(step))]
    assert not verified or (left and left[-1] >= verified[-1])
    unmade = {s for s in steps_in(before) if defect(before / str(s)) is None} - {
        step for step in steps_in(folder) if defect(folder / str(step)) is None
    }
    assert not unmade or "POINTED" in seen
    assert len(unmade) <= seen.count("UNMADE") + 1


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_at_every_step_leaves_the_old_or_the_new(name, run, undisturbed, befores, tmp_path):
    before, step = befores[name], SCENARIOS[name][2]
    old = what_is_there(before)
    for at in range(len(undisturbed[name])):
        folder, log = fresh(before, tmp_path / str(at)), tmp_path / f"{at}.log"
        assert run(name, folder, log, at) == -9
        seen = log.read_text().split()
        assert len(seen) == at + 1
        check_old_or_new(folder, step, seen, old)
        if before.exists():
            check_retention(folder, before, seen, step)
        if name in PRUNING:
            put_beside(folder, [step], 3, keep=1, keep_every=PRUNING[name])
        else:
            put(folder, step, 3, config=at % 2 == 0, verify=at % 3 == 0, file_bytes=MANY << at % 3)
        check_nothing_is_left(folder, step)


def check_nothing_is_left(folder, step):
    """After a save that succeeded there is nothing but checkpoints."""
    assert what_is_there(folder) == (step, 3)
    for each in steps_in(folder):
        names = {path.name for path in (folder / str(each)).iterdir()}
        assert not names or names == names_due(folder / str(each)), each
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files <= {"latest.txt", "latest.txt.tmp", "writer.lock"}


def test_the_kills_are_at_every_step_there_is(undisturbed):
    assert {step for steps in undisturbed.values() for step in steps} == set(SaveMoment.__members__)
    assert sum(map(len, undisturbed.values())) > 150


@pytest.mark.parametrize(
    ("victim", "at", "beside", "sizes"),
    [
        (1, SaveMoment.SHARD_OPENED, False, {"dp": 2}),
        (1, SaveMoment.SHARD_SYNCED, True, {"tp": 2}),
        (0, SaveMoment.TEXT_WRITTEN, True, {"dp": 2}),
        (0, SaveMoment.COMMITTED, False, {"tp": 2}),
        (0, SaveMoment.POINTED, True, {"tp": 2}),
    ],
)
def test_a_killed_rank_of_two_leaves_the_old_or_the_new(tmp_path, victim, at, beside, sizes):
    folder = tmp_path / "run"
    spawn(put_together, folder, 10, 1, {}, **sizes)
    with pytest.raises(RankError, match="died of SIGKILL|Connection"):
        spawn(put_and_die, folder, victim, at, beside, **sizes)
    seen = Path(f"{folder}.log").read_text().split()
    assert seen[-1] == at.name
    stands = at in (SaveMoment.COMMITTED, SaveMoment.POINTED)
    assert what_is_there(folder / "20") == ((20, 2) if stands else None)
    assert what_is_there(folder) == ((20, 2) if at is SaveMoment.POINTED else (10, 1))
    put(folder, 20, 3)
    check_nothing_is_left(folder, 20)
