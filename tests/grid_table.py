"""Write the tables of ``GRID.md``: the rows of the grid and what was measured for each.

``python tests/grid_table.py sample RESULTS`` writes one section again from a folder of results. It
exits with status 1 if a row failed, or if its verdict differs from that in the previous table. What
a folder has not of a row (its figures, or its bits in the reproducible mode) stays as it was.
"""

from __future__ import annotations

import functools
import json
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import grid
from grid import Row
from grid_check import Result

BITS = " Bits: "
"""Begins, above a table, the day and commit of bits that were measured alone."""
OTHERS, NOT_RUN = "others", "not run"
"""Of a row whose bits are not those of one process, and of one that was not measured."""
TABLE = Path(__file__).parent / "GRID.md"
HEAD = "| row | loss | norm | gradient | weight | resumed with | there | bits | verdict |"


@functools.cache
def rows_of(section: str) -> tuple[Row, ...]:
    """The rows that a section of the table has."""
    return tuple(getattr(grid, section)())


def line(found: Result, bits: str) -> str:
    """A row of the table; ``bits``: in the reproducible mode."""
    words = set(found.row.split("-"))
    changes = " ".join(word for word in found.elsewhere.split("-") if word not in words)
    numbers = " | ".join(
        f"{ratio:.3f}" for ratio in (found.loss, found.norm, found.gradient, found.weight)
    )
    there = "bitwise" if found.resumed is None else f"{found.resumed:.3f}"
    verdict = "FAIL" if found.faults or bits == OTHERS else "pass"
    return f"| {found.row} | {numbers} | {changes} | {there} | {bits} | {verdict} |"


def with_bits(line: str, bits: str) -> str:
    """A row of the table with other bits, and figures as they were."""
    *cells, _, verdict = line.strip("| ").split(" | ")
    return f"| {' | '.join(cells)} | {bits} | {'FAIL' if bits == OTHERS else verdict} |"


def bits_of(row: Row, results: Path, before: str) -> str:
    """The bits of a row in the mode: as measured, or as before."""
    file = results / f"{row}.bits.json"
    if not file.exists():
        return before
    return OTHERS if json.loads(file.read_text()) else "bitwise"


def verdicts(section: str) -> dict[str, str]:
    """Verdicts of a section of ``GRID.md`` by row."""
    table = re.findall(r"^\| (pp\S+) \|.*\| (\w+) \|$", read(section), re.MULTILINE)
    return dict(table)


def read(section: str) -> str:
    """The text between the marks of a section."""
    begin, end = _marks(section)
    return TABLE.read_text().partition(begin)[2].partition(end)[0]


def write(section: str, text: str, made: str | None = None) -> None:
    """Put a text between the marks of a section.

    Args:
        section: its name.
        text: the table.
        made: the line above it; None: today, this commit and this machine.
    """
    begin, end = _marks(section)
    before, _, rest = TABLE.read_text().partition(begin)
    after = rest.partition(end)[2]
    TABLE.write_text(f"{before}{begin}\n{made or stamp()}\n\n{text}\n{end}{after}")


def _marks(section: str) -> tuple[str, str]:
    return f"<!-- {section} -->\n", f"<!-- end of {section} -->\n"


def stamp() -> str:
    """Day, commit and machine."""
    import torch

    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}, gloo."
    )


def commit() -> str:
    """Return the commit of the working tree, marked where files were changed."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=TABLE.parent, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


def main(section: str, results: Path) -> int:
    """Write a section from its results; the exit status."""
    rows, before = rows_of(section), verdicts(section)
    made, *table = read(section).strip().splitlines()
    lines = {each.split(" | ")[0].strip("| "): each for each in table if each.startswith("| pp")}
    bits = {row: lines[str(row)].split(" | ")[-2] if str(row) in lines else NOT_RUN for row in rows}
    bits = {row: bits_of(row, results, earlier) for row, earlier in bits.items()}
    files = {row: results / f"{row}.json" for row in rows}
    if has_figures := any(file.exists() for file in files.values()):
        found = {
            row: line(Result(**json.loads(file.read_text())), bits[row])
            for row, file in files.items()
            if file.exists()
        }
    else:
        found = {row: with_bits(lines[str(row)], bits[row]) for row in rows if str(row) in lines}
    if missing := [row for row in rows if row not in found]:
        print(f"{len(missing)} rows were not run, {missing[0]} among them", file=sys.stderr)
        return 1
    rule = "|" + "---|" * HEAD.count(" | ") + "---|"
    made = stamp() if has_figures else f"{made.partition(BITS)[0]}{BITS}{stamp()}"
    write(section, "\n".join([HEAD, rule, *found.values()]), made)
    now = verdicts(section)
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            print(f"{name}: was {before.get(name, 'not there')}, is {now.get(name, 'not there')}")
    return int(set(now.values()) != {"pass"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
