"""Planted bugs, from ``mutants.toml``: runs tests on a copy of the tree with one bug at a time.

``python tests/mutants.py`` runs all, ``python tests/mutants.py NAME ...`` some. A bug is caught
when an assertion of a test fails, or the product says that numbers depart (``verify``, or an import
that is compared with transformers); the table of all goes into ``GRID.md``, below a line about the
last run of all, and one with the bugs that were run after it and their commits. The status is 1
where one of all is not caught, or a test fails anyway. ``--bits`` before the names judges bugs by
the bits of one step instead (``mutants_bits.py``).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import grid_table

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).parent / "mutants.toml"
LIMIT = 600
"""Seconds that the tests of one bug may take: one that hangs is not caught by its numbers."""
NOBODY = "NOBODY"
HEAD = "| bug | seen | file | chosen by | caught by | what it says |\n" + "|---" * 6 + "|"
FAILED = re.compile(r"^FAILED (.+?)(?: - (.*))?$", re.MULTILINE)
OTHER = "OtherModel: logits"
"""What an import says of a model that computes something else."""
DEPARTS = re.compile(r"^FAIL: .* departs from one process.*$", re.MULTILINE)
LATER = "Run later: "
RUN_LATER = re.compile(r"(?:^|; )(.+?) \(([\w-]+)\)(?=; |\.$)")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug: ``old`` is ``new`` in a file."""

    name: str
    seen: str
    """Where such a bug was, or what would make one write it."""
    chosen_by: str
    """``author``, or ``stranger``: who had not read the tests."""
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """What pytest is given; or ``verify`` and its flags."""
    no_bits: str = ""
    """Why one step of the reproducible mode cannot show it, where its place does not say so."""


def mutants() -> list[Mutant]:
    """The list."""
    entries = tomllib.loads(LIST.read_text())["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def problems(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """Why a mutant cannot be planted: its text is not there just once, or no test is named."""
    file = root / mutant.file
    count = file.read_text().count(mutant.old) if file.is_file() else 0
    found = [] if count == 1 else [f"{mutant.name}: {mutant.file} has its text {count} times"]
    if mutant.old == mutant.new:
        found.append(f"{mutant.name}: nothing is changed")
    paths = list(takewhile(lambda test: not test.startswith(("-", "verify")), mutant.tests))
    if not mutant.tests:
        found.append(f"{mutant.name}: no tests are named")
    for path in (test.partition("::")[0] for test in paths):
        if not (root / path).exists():
            found.append(f"{mutant.name}: there is no {path}")
    return found


def copy_tree(target: Path) -> None:
    """Copy what git knows of, as it stands in the working tree."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run(tests: tuple[str, ...], tree: Path) -> tuple[int, str]:
    """Status and output of the tests, or of ``verify``, of a tree."""
    paths = [*sorted(tree.glob("packages/*/src")), *sorted(tree.glob("apps/*/"))]
    here = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    here |= {"COLUMNS": "400"}  # messages of failures are not cut
    if tests[0].startswith("verify"):
        command = ["apps/train", *shlex.split(tests[0])]
    else:
        command = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", *tests]
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tree, env=os.environ | here, capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, f"took longer than {LIMIT} s"
    return done.returncode, done.stdout + done.stderr


def catch(mutant: Mutant, tree: Path) -> tuple[bool, str, str]:
    """Whether numbers showed the bug; which test, and what it said."""
    file = tree / mutant.file
    right = file.read_text()
    file.write_text(right.replace(mutant.old, mutant.new))
    try:
        status, output = run(mutant.tests, tree)
    finally:
        file.write_text(right)
    if mutant.tests[0].startswith("verify"):
        said = DEPARTS.findall(output)
        return (
            status == 1 and bool(said),
            mutant.tests[0],
            said[0].strip() if said else output[-200:],
        )
    failed = FAILED.findall(output)
    if status != 1 or not failed:
        return False, "", output.strip()[-200:]
    test, said = failed[0]
    numbers = "AssertionError" in said or OTHER in said or said.startswith("assert ")
    return numbers, test, said


def main(names: list[str]) -> int:
    """Run the bugs, all or the named ones; the table of all; the exit status."""
    chosen = [each for each in mutants() if not names or each.name in names]
    if unknown := set(names) - {each.name for each in chosen}:
        print(f"no bugs of these names are listed: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if wrong := [line for each in chosen for line in problems(each)]:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for tests in sorted({each.tests for each in chosen}):
            status, output = run(tests, tree)
            if status:
                print(f"without a bug, {' '.join(tests)} fails:\n{output[-2000:]}", file=sys.stderr)
                return 1
        rows = _known()
        for each in chosen:
            is_caught, test, said = catch(each, tree)
            verdict = "caught" if is_caught else "NOT CAUGHT"
            print(f"{verdict}: {each.name}: {test} {said}", flush=True)
            rows[each.name] = _line(each, is_caught, test, said)
    listed = [rows[each.name] for each in mutants() if each.name in rows]
    caught = sum(NOBODY not in row for row in listed)
    score = f"{caught} of {len(mutants())} are caught."
    print(score)
    table = "\n".join([score, "", HEAD, *listed])
    made = header(grid_table.read("mutants"), names, grid_table.commit()) if names else None
    grid_table.write("mutants", table, made)
    return int(caught < len(mutants()))


def header(section: str, names: list[str], commit: str) -> str:
    """Return the lines above the table after a run of some bugs.

    Args:
        section: the section of ``GRID.md`` before the run.
        names: the bugs that were run.
        commit: where they were run.

    Returns:
        The line of the last run of all bugs, then those that were run after it and their commits.
    """
    made, *more = section.strip().splitlines() or ["All bugs were never run together."]
    before = more[0].removeprefix(LATER) if more and more[0].startswith(LATER) else ""
    later = dict(RUN_LATER.findall(before)) | dict.fromkeys(names, commit)
    return f"{made}\n{LATER}" + "; ".join(f"{name} ({at})" for name, at in later.items()) + "."


def _known() -> dict[str, str]:
    """Rows of the table as it is, by the name of the bug."""
    lines = grid_table.read("mutants").splitlines()
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}


def _line(mutant: Mutant, is_caught: bool, test: str, said: str) -> str:
    file = Path(mutant.file).relative_to(*Path(mutant.file).parts[:1])
    words = said.replace("|", "/").replace("\n", " ")[:160]
    by = test if test.startswith("verify") else test.rpartition("/")[2]
    by = by if is_caught else NOBODY
    return f"| {mutant.name} | {mutant.seen} | {file} | {mutant.chosen_by} | {by} | {words} |"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bits"]:
        import mutants_bits

        sys.exit(mutants_bits.main(sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
