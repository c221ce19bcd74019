"""The benchmark of a step: its layouts are valid with and without the mode, and one is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import bench_step


def test_every_layout_has_the_mode() -> None:
    for sizes, keys, of_mode in bench_step.PAIRS.values():
        usual = bench_step.configure(keys, **sizes)
        exact = bench_step.configure((*keys, *of_mode), mode=True, **sizes)
        assert exact.general.reproducible and not usual.general.reproducible
        assert exact.parallelism.cp == usual.parallelism.cp == sizes.get("cp", 1)
        assert exact.global_batch_size == usual.global_batch_size


def test_a_layout_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--set", "tokens.sequence_length=8", "--set", "tokens.micro_batch_size=2"]
    bench_step.main(["--rounds", "1", "--only", "cp 2", *short])
    lines = capsys.readouterr().out.splitlines()
    names = ["one process", "one process, reproducible", "cp 2", "cp 2, reproducible"]
    assert [line[:33].strip() for line in lines[1:]] == names
    assert [len(line[33:].split()) for line in lines[1:]] == [3, 4, 3, 4]
