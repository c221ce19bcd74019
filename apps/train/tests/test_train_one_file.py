"""The training in one file: begun on eight ranks and ended on two, it has one process's curve."""

import re
import sys
from pathlib import Path

import pytest
import runs

EXAMPLE = runs.APP / "kenotron_train/templates/training"


def curve(folder: Path, *flags: str) -> list[float]:
    """Losses that a run prints."""
    folder.mkdir(exist_ok=True)
    done = runs.start(sys.executable, str(EXAMPLE / "train.py"), *flags, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]


def test_a_curve_does_not_depend_on_the_layout_nor_on_a_resume(tmp_path: Path) -> None:
    whole = curve(tmp_path / "whole", "--steps", "7")
    begun = curve(tmp_path / "cut", "--pp", "2", "--dp", "2", "--tp", "2", "--steps", "4")
    ended = curve(tmp_path / "cut", "--tp", "2", "--steps", "7")
    assert len(begun) == 4 and whole[-1] < whole[0] - 0.5
    assert begun + ended == pytest.approx(whole, abs=2e-4)


def test_it_can_be_read_at_one_go() -> None:
    assert len((EXAMPLE / "train.py").read_text().splitlines()) <= 300
