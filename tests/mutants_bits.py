"""Planted bugs that one step shows to the bit: ``python tests/mutants.py --bits [NAME ...]``.

Each bug of ``mutants.toml`` is planted in a copy of the tree, and a step of the reproducible mode
is computed on the layouts of ``bits_layouts.py`` that run its lines, until loss, norm, a gradient,
a weight or a moment has other bits than one process without it. The table in ``GRID.md`` is written
after each bug; ``--bits --rest`` continues with those that were not judged yet. The exit status is
1 where a bug is missed, or no layout runs it, and nothing says why that must be so.
"""

from __future__ import annotations

import ast
import compileall
import json
import os
import py_compile
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grid_table
import mutants
from mutants import Mutant

SECTION = "bits"
HEAD = "| bug | one step | layout | what differs |\n|---|---|---|---|"
VERDICTS = CAUGHT, STOPPED, MISSED, OUTSIDE, NOT_RUN = (
    "caught", "stopped", "missed", "outside", "not yet",
)  # fmt: skip
AND = " Continued: "
LIMIT = 120.0
"""Seconds that a layout may take."""
FEW = 4
"""Layouts that are computed where something says why none can show a bug."""
OUTSIDE_BY_PLACE = {
    "packages/kenotron-ckpt/": "checkpoints",
    "packages/kenotron-data/": "data",
    "packages/kenotron-config/": "checks of a config",
    "packages/kenotron-dist/src/kenotron_dist/statistics.py": "checksums of checkpoints",
    "packages/kenotron-nanotron/": "a converter",
    "apps/convert/": "a converter",
    "apps/generate/": "texts of a trained model",
    "apps/train/kenotron_train/run/": "what surrounds the steps",
    "apps/train/kenotron_train/log/": "what surrounds the steps",
    "apps/train/kenotron_train/report/": "what surrounds the steps",
    "apps/train/kenotron_train/preflight/": "what surrounds the steps",
    "packages/kenotron-cost/": "the planner",
    "apps/plan/": "the planner",
    "packages/kenotron-models/src/kenotron_models/transformers_": "the mode refuses these models",
    "packages/kenotron-tp/src/kenotron_tp/planned_": "the mode refuses models of transformers",
    "packages/kenotron-tp/src/kenotron_tp/plan_": "the mode refuses models of transformers",
    "packages/kenotron-tp/src/kenotron_tp/fused_pieces.py": "the mode refuses these models",
    "packages/kenotron-tp/src/kenotron_tp/parallelize.py": "the mode refuses layers of one's own",
    "packages/kenotron-models/src/kenotron_models/hf_": "a converter",
    "packages/kenotron-models/src/kenotron_models/adapter": "the mode refuses adapters",
    "packages/kenotron-models/src/kenotron_models/kv_cache.py": "texts of a trained model",
    "packages/kenotron-models/src/kenotron_models/families/": "the reading of a model's config",
    "packages/kenotron-optim/src/kenotron_optim/accumulate.py": "the sums of the default mode",
    "packages/kenotron-optim/src/kenotron_optim/data_axes.py": "the mode refuses shard_ranks",
    "packages/kenotron-engine/src/kenotron_engine/evaluation.py": "held-out losses",
    "packages/kenotron-engine/src/kenotron_engine/row_scores.py": "held-out texts",
    "packages/kenotron-optim/src/kenotron_optim/rank_costs.py": "the planner",
}
"""Folders and beginnings of files that no step of the mode runs, and what they are."""


@dataclass(frozen=True)
class Found:
    """What one step showed of a bug."""

    verdict: str
    case: str = ""
    said: str = ""


def reason(mutant: Mutant) -> str:
    """Return why a step of the mode cannot show a bug, as said for it or its place, or nothing."""
    places = (why for place, why in OUTSIDE_BY_PLACE.items() if mutant.file.startswith(place))
    return mutant.no_bits or next(places, "")


def lines_of(mutant: Mutant, text: str) -> set[int] | None:
    """Return the lines of the statements that a bug changes; None: of a module or a class.

    Args:
        mutant: the bug.
        text: of its file without the bug.
    """
    begin = text[: text.index(mutant.old)].count("\n") + 1
    end = begin + mutant.old.rstrip("\n").count("\n")
    tree, found = ast.parse(text), set[int]()
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    if not any(f.lineno <= begin and end <= (f.end_lineno or 0) for f in functions):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr) and node.end_lineno is not None:
            inner = isinstance(node, ast.stmt) and hasattr(node, "body")
            last = node.lineno if inner else node.end_lineno
            if node.lineno <= end and begin <= last and not isinstance(node, ast.FunctionDef):
                found |= set(range(node.lineno, last + 1))
    return found or set(range(begin, end + 1))


class Steps:
    """Computes steps of a copy of the tree, whose files may have bugs; see ``fork_trees.py``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree = folder, folder / "tree"
        mutants.copy_tree(self.tree)
        by_content = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.tree, quiet=2, invalidation_mode=by_content)
        server = [sys.executable, str(Path(__file__).parent / "fork_trees.py")]
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(server, env=env, text=True, **pipes)

    def close(self) -> None:
        """End the process."""
        self._server.communicate()

    def compute(
        self, cases: Sequence[str], files: Mapping[str, str], reference: bool
    ) -> list[dict[str, Any]]:
        """Return what came of cases: see ``bits_cases.answer``. What took too long is missing."""
        assert self._server.stdin and self._server.stdout
        out = self.folder / "answer.json"
        out.unlink(missing_ok=True)
        request = {
            "tree": str(self.tree), "out": str(out), "limit": LIMIT * len(cases),
            "folder": str(self.folder), "cases": list(cases), "files": dict(files),
            "reference": reference,
        }  # fmt: skip
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        if self._server.stdout.readline() != "done\n":
            raise RuntimeError("fork_trees.py has ended")
        return json.loads(out.read_text()) if out.exists() else []

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Let the tree have a bug."""
        file = self.tree / mutant.file
        right = file.read_text()
        file.write_text(right.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            file.write_text(right)


def lines_of_cases(
    steps: Steps, cases: Sequence[str], chosen: Sequence[Mutant]
) -> dict[str, dict[str, set[int]]]:
    """Measure one process and each layout without a bug.

    Returns:
        Lines that were run, of the files with bugs, by file and case.

    Raises:
        RuntimeError: a layout has other bits without a bug.
    """
    files = {str(steps.tree / each.file): each.file for each in chosen}
    found = dict[str, dict[str, set[int]]]()
    for case in cases:
        begin = time.monotonic()
        lines = check(case, steps.compute([case], files, True))
        found[case] = {name: set(each) for name, each in lines.items()}
        print(f"{case}: {time.monotonic() - begin:.0f} s", flush=True)
    return found


def check(case: str, answers: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the lines that a layout ran; RuntimeError where it has other bits without a bug."""
    [got] = answers or [{"error": f"took more than {LIMIT} s"}]
    if wrong := got.get("error") or got.get("differs"):
        raise RuntimeError(f"without a bug, {case}: {wrong}")
    return got["lines"]


def judge(steps: Steps, mutant: Mutant, run: Mapping[str, dict[str, set[int]]]) -> Found:
    """Plant a bug, and compute the layouts that run its lines until one shows it."""
    lines = lines_of(mutant, (steps.tree / mutant.file).read_text())
    cases = [case for case, seen in run.items() if lines is None or lines & seen[mutant.file]]
    if not cases or (lines is None and reason(mutant)):
        return Found(OUTSIDE)
    cases = cases[:FEW] if mutant.no_bits else cases
    with steps.planted(mutant):
        answers = steps.compute(cases, {}, False)
    for each in answers:
        if differs := each.get("differs"):
            more = f" and {len(differs) - 1} more" if len(differs) > 1 else ""
            return Found(CAUGHT, each["case"], differs[0] + more)
    errors = [each for each in answers if "error" in each]
    if errors or len(answers) < len(cases):
        waits = {"case": cases[len(answers) % len(cases)], "error": "ranks wait for one another"}
        last = [*errors, waits][0]
        return Found(STOPPED, last["case"] or cases[0], last["error"])
    more = f" and {len(cases) - FEW} more" if len(cases) > FEW else ""
    return Found(MISSED, "; ".join(cases[:FEW]) + more)


def line(mutant: Mutant, found: Found) -> str:
    """Return a row of the table: where bits show nothing, the reason as it is now."""
    is_reason = found.verdict in (MISSED, OUTSIDE)
    words = (reason(mutant) if is_reason else found.said).replace("|", "/").replace("\n", " ")
    return f"| {mutant.name} | {found.verdict} | {found.case} | {words[:160]} |"


def main(names: Sequence[str], cases: Sequence[str] = ()) -> int:
    """Judge bugs, all or the named ones; write the table; the exit status."""
    import grid_run
    from bits_layouts import CASES

    bugs = {each.name: each for each in mutants.mutants()}
    known = {name: results().get(name, Found(NOT_RUN)) for name in bugs}
    before, now = grid_table.read(SECTION), grid_table.stamp()
    chosen = list(names)
    if not chosen:
        known = dict.fromkeys(bugs, Found(NOT_RUN))
    elif chosen == ["--rest"]:
        chosen = [name for name, found in known.items() if found.verdict == NOT_RUN]
        now = f"{before.strip().partition(AND)[0].splitlines()[0]}{AND}{now}"
    elif unknown := set(chosen) - bugs.keys():
        print(f"no bugs of these names are listed: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    else:
        now = mutants.header(before, chosen, grid_table.commit())
    with tempfile.TemporaryDirectory(prefix="mutants-bits-") as folder:
        steps = Steps(Path(folder))
        grid_run.write_documents(steps.folder)
        try:
            given = cases or sorted(CASES, key=lambda name: CASES[name].row.ranks)
            run = lines_of_cases(steps, given, [bugs[name] for name in chosen or bugs])
            for name in chosen or bugs:
                begin = time.monotonic()
                known[name] = judge(steps, bugs[name], run)
                words = line(bugs[name], known[name])
                print(f"{words} {time.monotonic() - begin:.1f} s", flush=True)
                score = write(known, now)
        finally:
            steps.close()
    print(score)
    return int(any(unexplained(bugs[name], each) for name, each in known.items()))


def unexplained(mutant: Mutant, found: Found) -> bool:
    """Return whether bits do not show a bug, and nothing says why.

    A bug whose lines a layout runs has a reason of its own; else its place may be one.
    """
    if found.verdict in (CAUGHT, STOPPED):
        return False
    return not (reason(mutant) if found.verdict == OUTSIDE else mutant.no_bits)


def results() -> dict[str, Found]:
    """Return what the table says, by bug."""
    text = grid_table.read(SECTION)
    rows = re.findall(r"^\| (.+?) \| (\w[\w ]*) \| (.*?) ?\| (.*?) ?\|$", text, re.M)
    return {name: Found(*cells) for name, *cells in rows[1:]}


def write(known: Mapping[str, Found], made: str) -> str:
    """Write the table below a line that says when it was made; return how many bugs are caught."""
    verdicts = [found.verdict for found in known.values()]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in VERDICTS)
    score = f"Of {len(known)} bugs: {counts}."
    rows = [line(each, known[each.name]) for each in mutants.mutants()]
    grid_table.write(SECTION, "\n".join([score, "", HEAD, *rows]), made)
    return score
