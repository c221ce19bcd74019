"""Tests that fail are run once more, alone; what fails twice fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import once_more
import pytest

UNSTEADY = """
import pathlib
import pytest

@pytest.mark.parametrize("name", ["a/b.md", "c"])
@pytest.mark.xdist_group("docs")
def test_first(name):
    mark = pathlib.Path(__file__).with_name("seen-" + name.replace("/", "-"))
    there = mark.exists()
    mark.touch()
    assert there or name == "c"

def test_other():
    pass
"""


def run(folder: Path, text: str, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")  # names of tests are relative to here
    command = [sys.executable, once_more.__file__, *more, str(folder / "test_it.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("more", [(), ("-n", "2", "--dist", "loadgroup", "-k", "test")])
def test_what_passes_alone_is_named_and_passes(tmp_path: Path, more: tuple[str, ...]) -> None:
    done = run(tmp_path, UNSTEADY, *more)
    assert done.returncode == 0, done.stdout
    assert "1 failed, 2 passed" in done.stdout and "1 passed" in done.stdout
    assert "UNSTEADY: failed beside other tests, passed alone: " in done.stdout
    assert "test_it.py::test_first[a/b.md]" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("def test_a(): assert False", 2),
        ("import pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_a(n): assert False", 1),
        ("import nothing_of_this_name", 1),
    ],
)
def test_what_fails_again_many_failures_and_errors_fail(
    tmp_path: Path, text: str, times: int
) -> None:
    done = run(tmp_path, text)
    assert done.returncode in (1, 2) and "UNSTEADY" not in done.stdout
    assert done.stdout.count("test session starts") == times


def test_a_run_without_failures_is_one_run(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_a(): pass")
    assert done.returncode == 0 and done.stdout.count("test session starts") == 1


def test_options_stay_and_other_tests_go() -> None:
    given = ["-n", "3", "-n", "auto", "--dist", "loadgroup", "--max-worker-restart=0"]
    given += ["-p", "by_turns", "--durations=25", "-m", "not gloo", "tests/test_a.py"]
    assert once_more.alone(given, ["t.py::a"]) == [
        "-p", "by_turns", "--durations=25", "t.py::a"
    ]  # fmt: skip
