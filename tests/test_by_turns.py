"""Variants of costly tests by turns, and folders of tests that run beside each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import by_turns
import grid_choice
import lanes
import nox_lanes
import pytest

VARIANTS = """
import pytest

@pytest.mark.by_turns(2)
@pytest.mark.parametrize("n", range(5))
def test_costly(n): pass

@pytest.mark.by_turns(1, of="size")
@pytest.mark.parametrize("size", "ab")
@pytest.mark.parametrize("kind", "xy")
def test_by_size(size, kind): pass

@pytest.mark.parametrize("n", range(4))
def test_cheap(n): pass
"""


def chosen(folder: Path, *options: str) -> list[str]:
    """Names of the tests that run."""
    (folder / "test_it.py").write_text(VARIANTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = by_turns(most, of)\n")
    command = [sys.executable, "-m", "pytest", "-p", "by_turns", "--collect-only", "-q", *options]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True,
        env={"PYTHONPATH": str(Path(by_turns.__file__).parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::test_")[2] for line in done.stdout.splitlines() if "::" in line]


def test_turns_have_some_variants_each_and_together_all(tmp_path: Path) -> None:
    every = chosen(tmp_path)
    assert len(every) == 5 + 4 + 4
    turns = [chosen(tmp_path, f"--turn={turn}") for turn in range(6)]
    assert set().union(*turns) == set(every)
    for turn in turns:
        assert 1 <= sum(name.startswith("costly") for name in turn) <= 2
        assert [name.startswith("cheap") for name in turn].count(True) == 4
        sizes = {name[len("by_size[") :].split("-")[-1] for name in turn if "size" in name}
        assert len(sizes) == 1 and sum("size" in name for name in turn) == 2


def test_a_variant_that_is_named_runs_and_most_limits_every_test(tmp_path: Path) -> None:
    for turn in range(3):
        assert chosen(tmp_path, f"--turn={turn}", "test_it.py::test_costly[4]") == ["costly[4]"]
    few = chosen(tmp_path, "--turn=1", "--most=1")
    assert len(few) == 1 + 2 + 1


class Item:
    def __init__(self, n: int, mark: pytest.Mark | None = None) -> None:
        self.nodeid, self.mark = f"tests/test_it.py::test_costly[{n}]@group", mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.mark


def test_a_marked_test_runs_on_more_days_and_every_variant_has_its_day():
    mark = pytest.mark.by_turns(1).mark
    for seconds, days in ((1.0, 1), (6.0, 1), (12.0, 2), (100.0, 3)):
        items, ran = [Item(n, mark) for n in range(4)], []
        for turn in range(739_000, 739_000 + 12 * days):
            left_out = {*by_turns.of_other_turns(items, turn, seconds=seconds)}
            ran += [item.nodeid for item in items if item not in left_out]
        assert len(ran) == 12 and {ran.count(item.nodeid) for item in items} == {3}


@pytest.mark.parametrize("count, seconds", [(1, 1.0), (7, 1.0), (40, 3.0), (5, 9.0), (1, 70.0)])
def test_a_costly_test_has_its_share_of_a_day_and_every_variant_its_day(count, seconds):
    items = [Item(n) for n in range(count)]
    ran, busy = set(), 0.0
    for turn in range(739_000, 739_000 + 200):
        left_out = {*by_turns.of_other_turns(items, turn, seconds=seconds)}
        ran |= {item.nodeid for item in items if item not in left_out}
        busy += seconds * (count - len(left_out))
    assert len(ran) == count
    assert busy / 200 <= max(by_turns.SECONDS, seconds / 4 + 0.5)


def test_the_table_of_costly_tests_names_those_that_there_are():
    root = by_turns.COSTLY.parents[1]
    table = by_turns.seconds_of_tests()
    assert len(table) > 200 and [*table] == sorted(table)
    for name, seconds in table.items():
        file, _, function = name.partition("::")
        assert (root / file).exists(), f"{name}: no such file: remove or rename the line"
        assert f"def {function}(" in (root / file).read_text(), f"{name}: no such test"
        assert seconds > 0


def test_seconds_of_costly_tests_are_written(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_long(): time.sleep(0.2)\ndef test_b(): pass"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "plugin.py").write_text(
        "from by_turns import *\nimport by_turns\nby_turns.LISTED = 0.1"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "plugin", "--costly=table.txt", "-n", "1"],
        cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": f"{tmp_path}:{Path(by_turns.__file__).parent}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (tmp_path / "table.txt").read_text().splitlines()
    assert line.split()[1] == "test_it.py::test_long" and 0.1 < float(line.split()[0]) < 5


def run_lanes(folder: Path, **texts: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    listed = {}
    for name, text in texts.items():
        file = folder / f"test_{name}.py"
        file.write_text(text)
        listed[name] = {"arguments": [str(file)], "environment": {"LANE": name}}
    (folder / "lanes.json").write_text(json.dumps(listed))
    command = [sys.executable, lanes.__file__, str(folder / "lanes.json")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


GOOD = "import os\ndef test_it(): assert os.environ['LANE'] == 'good'"
UNSTEADY = """
import pathlib
import pytest

@pytest.mark.parametrize("n", range({}))
def test_it(n):
    mark = pathlib.Path(__file__).with_name(f"{}-{{n}}")
    there = mark.exists()
    mark.touch()
    assert there
"""


def test_lanes_pass_where_all_pass_and_name_what_fails(tmp_path: Path) -> None:
    done = run_lanes(tmp_path, good=GOOD, none="")
    assert done.returncode == 0, done.stdout
    assert "good: status 0" in done.stdout and "1 passed in" in done.stdout
    bad = run_lanes(tmp_path, good=GOOD, bad="def test_it(): assert False")
    assert bad.returncode == 1 and "bad: status 1" in bad.stdout and "good: status 0" in bad.stdout


@pytest.mark.parametrize(("more", "status"), [(0, 0), (1, 1)])
def test_unsteady_tests_of_all_lanes_have_one_budget(
    tmp_path: Path, more: int, status: int
) -> None:
    texts = {"a": UNSTEADY.format(1, "a"), "b": UNSTEADY.format(lanes.BUDGET - 1 + more, "b")}
    done = run_lanes(tmp_path, **texts)
    assert done.returncode == status, done.stdout
    assert f"{lanes.BUDGET + more} unsteady" in done.stdout


def test_a_change_reaches_the_packages_that_need_it() -> None:
    every = nox_lanes.affected(["packages/kenotron-dist/README.md"])
    assert every.keys() == nox_lanes.lanes().keys()
    left_out = {*nox_lanes.lanes()["packages"]["arguments"]} - {*every["packages"]["arguments"]}
    assert {Path(folder).parent.name for folder in left_out} == {
        "kenotron-data",
        "kenotron-command",
    }
    reached = nox_lanes.affected(["packages/kenotron-cp/src/kenotron_cp/a.py"])
    assert {"packages", "communication", "apps/train", "programs", "across"} == {*reached}
    tested = [word for lane in reached.values() for word in lane["arguments"]]
    assert {Path(word).parent.name for word in tested if word.endswith("/tests")} >= {
        "kenotron-cp", "kenotron-models", "train",
    }  # fmt: skip
    assert not any("kenotron-tp" in word or "kenotron-data" in word for word in tested)
    assert reached["across"]["arguments"][-1] == "--touched=cp"
    assert set(nox_lanes.affected(["tests/grid.py"])) == {"across"}
    assert not nox_lanes.affected(["README.md"])


def test_rows_of_a_change_use_what_it_touches() -> None:
    every = grid_choice.chosen()
    few = grid_choice.touched(["cp", "ep"])
    assert 0 < len(few) < len(every)
    experts = ("deepseek", "qwen2_moe", "qwen2_moe_limited")
    assert all(row.cp > 1 or row.ep > 1 or row.arch in experts for row in few)
    assert {row for row in every if row.cp > 1} <= set(few)
    assert grid_choice.touched(["dist"]) == every
