"""A pytest plugin: of costly tests a run has some variants, and runs of other days the others.

``@pytest.mark.by_turns(3)``: three of the variants a day, or a few more; ``by_turns(1, of="name")``
counts the values of one parameter. A test without the mark that is in ``COSTLY`` has as many
variants a day as ``SECONDS`` allow. If it takes one of the times in ``DAYS`` it runs on some days
only, with the mark on twice as many. ``--turn`` is a number of the day; without it, and for tests
that are named on the command line, all run. ``--most 2``: of every test, where variants differ by
the same code, as in a suite that runs a second time over the fake NCCL.

``--costly FILE`` measures: it enters what ran into that table, if all of it took over ``LISTED``
seconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

COSTLY = Path(__file__).with_name("costly_tests.txt")
"""Seconds of one variant, and the test: measured on two cores that had other work, too."""
SECONDS = 6.0
"""That the variants of a test may take on one day."""
DAYS = ((30.0, 6), (12.0, 4), (6.0, 3), (3.0, 2))
"""Of so many days a test that takes as many seconds, or more, runs on one."""
LISTED = 3.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--turn", type=int, help="which of the costly tests and variants run")
    parser.addoption("--most", type=int, help="of every test so many variants a turn")
    parser.addoption("--costly", type=Path, help="a file for seconds of costly tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turn, most = config.getoption("--turn"), config.getoption("--most")
    if turn is None or any("::" in argument for argument in config.args):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(_test(item.nodeid), []).append(item)
    left_out = {
        id(item)
        for name, each in tests.items()
        for item in of_other_turns(each, turn, most, seconds_of_tests().get(name, 0.0))
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


@cache
def seconds_of_tests(file: Path = COSTLY) -> dict[str, float]:
    """Return the table: seconds of one variant, by the test."""
    pairs = [line.split(maxsplit=1) for line in file.read_text().splitlines()]
    return {name: float(seconds) for seconds, name in pairs}


def of_other_turns(
    variants: Sequence[pytest.Item], turn: int, most: int | None = None, seconds: float = 0.0
) -> list[pytest.Item]:
    """Return those of a test's variants that this turn leaves out.

    Args:
        variants: all of one test.
        turn: number of the day.
        most: variants a turn, where this is fewer than the mark says.
        seconds: that one variant takes.
    """
    mark = variants[0].get_closest_marker("by_turns")
    of = mark.kwargs.get("of") if mark else None
    values = [repr(item.callspec.params[of]) if of else n for n, item in enumerate(variants)]  # type: ignore[attr-defined]
    distinct = list(dict.fromkeys(values))
    limits = [*(mark.args if mark else ()), *([most] if most else ())]
    if seconds and not mark:
        limits.append(max(1, int(SECONDS / seconds)))
    turns = -(-len(distinct) // min(limits, default=len(distinct)))
    days = _days(seconds * len(variants) / turns)
    if mark:  # it asks for this many a day: half as seldom as others that take as long
        days = max(1, days // 2)
    if (turn + zlib.crc32(_test(variants[0].nodeid).encode())) % days:
        return list(variants)
    chosen = set(distinct[turn // days % turns :: turns])
    return [item for item, value in zip(variants, values, strict=True) if value not in chosen]


def _test(name: str) -> str:
    """Name of a test without that of its variant, and of pytest-xdist's group."""
    return name.partition("[")[0].partition("@")[0]


def _days(seconds: float) -> int:
    """Days of which one has a test that takes so long."""
    return next((days for least, days in DAYS if seconds >= least), 1)


class _Table:
    """Seconds of all tests that run, which are entered into a table at the end."""

    def __init__(self, file: Path) -> None:
        self.file, self.seconds = file, dict[str, list[float]]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.seconds.setdefault(_test(report.nodeid), []).append(report.duration)

    def pytest_sessionfinish(self) -> None:
        before = seconds_of_tests(self.file) if self.file.exists() else {}
        table = {name: seconds for name, seconds in before.items() if name not in self.seconds}
        for name, each in self.seconds.items():
            if sum(each) > LISTED:
                table[name] = sum(each) / len(each)
        self.file.write_text("".join(f"{table[name]:.2f} {name}\n" for name in sorted(table)))


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("--costly")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Table(file))
