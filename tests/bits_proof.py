"""One training of many steps on twelve layouts, to the bit: ``python tests/bits_proof.py``.

A tied Llama of five layers, with grouped key heads and a vocabulary that no tp divides, learns at a
rate that warms up and decays, in the reproducible mode. Losses and gradient norms of all steps, and
weights, moments and the held-out loss after the last, are compared with ``==`` with those of one
process. Samples are whole on some layouts and cut in chunks on others, which have bits of their
own: two curves. After 200 steps rows of the table in ``GRID.md`` are written; the exit status is 1
where bits differ.
"""

from __future__ import annotations

import argparse
import pickle
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import grid_bits
import grid_table
from grid import CUT_LENGTH, Row
from grid_check import changed, continued
from grid_run import Measured, measure, write_documents

STEPS = 200
MODEL = Row(tied=True, sequence=CUT_LENGTH)
WHOLE, CUT = "one process", "one process, chunks"
RESUMED = "pp 2 to dp 2, tp 2 halfway"
FROM = "pp 2, interleaved"
"""The layout whose run is resumed."""
LAYOUTS = {
    WHOLE: MODEL,
    "dp 2": replace(MODEL, sizes=(1, 2, 1), micro=1),
    "dp 3, ZeRO 2": replace(MODEL, sizes=(1, 3, 1), zero=2, reduce="step", micro=2),
    FROM: replace(MODEL, sizes=(2, 1, 1), engine="interleaved"),
    "pp 3, zero bubble": replace(MODEL, sizes=(3, 1, 1), engine="zb-h1", recompute="full"),
    "tp 2": replace(MODEL, sizes=(1, 1, 2)),
    "tp 4, sequence parallel": replace(MODEL, sizes=(1, 1, 4), mode="sp+overlap"),
    "dp 2, tp 2, ZeRO 3": replace(MODEL, sizes=(1, 2, 2), zero=3, mode="sp"),
    "pp 2, dp 2, tp 2, V": replace(MODEL, sizes=(2, 2, 2), engine="zb-v", recompute="selective"),
    RESUMED: replace(MODEL, sizes=(1, 2, 2), zero=1, mode="sp"),
    CUT: MODEL,
    "cp 2, ring": replace(MODEL, cp=2),
    "cp 4, ulysses": replace(MODEL, cp=4, way="ulysses", zero=3),
    "pp 2, cp 2, gather": replace(MODEL, sizes=(2, 1, 1), cp=2, way="gather", engine="zb-h1"),
}
"""Twelve, and one process for samples in chunks."""
SHARDS, CHUNKS = 4, 4
HEAD = "| layout | ranks | seconds | losses, norms, weights, moments |\n|---|---|---|---|"


def is_cut(name: str) -> bool:
    """Return whether samples of a layout are computed in chunks."""
    return name == CUT or LAYOUTS[name].cp > 1


def keys_of(name: str, steps: int) -> dict[str, str]:
    """Keys of a layout's config: the mode, the rate, and a checkpoint halfway."""
    cut = is_cut(name)
    return {
        **grid_bits.keys(LAYOUTS[name]),
        "general.reproducible_max_tp": "1" if cut else str(SHARDS),
        "general.reproducible_max_cp": str(CHUNKS) if cut else "1",
        "checkpoints.checkpoint_interval": str(max(steps // 2, 1)),
        "optimizer.learning_rate_scheduler.learning_rate": "3e-3",
        "optimizer.learning_rate_scheduler.min_decay_lr": "3e-4",
        "optimizer.learning_rate_scheduler.lr_warmup_steps": str(max(steps // 10, 1)),
        "optimizer.learning_rate_scheduler.lr_decay_steps": str(max(steps * 4 // 5, 1)),
    }


def differing(got: Measured, want: Measured) -> list[str]:
    """Name what is not the same bits, with the first step whose loss or norm differs."""
    found = grid_bits.differing(got, want)
    if len(got.losses) != len(want.losses):
        return [f"{len(got.losses)} steps, not {len(want.losses)}", *found]
    pairs = zip(got.losses, want.losses, got.norms, want.norms, strict=True)
    first = next((n for n, (a, b, c, d) in enumerate(pairs, 1) if a != b or c != d), None)
    return found if first is None else [f"step {first}", *found]


def prove(
    names: Iterable[str], steps: int, results: Path, *, log: bool = True
) -> dict[str, tuple[float, list[str]]]:
    """Run layouts, and compare each with one process.

    Args:
        names: of ``LAYOUTS``; what they are compared with, and resumed from, is run before them.
        steps: of each run, at least 2.
        results: a folder: runs that are there are not made again.
        log: print a line for each.

    Returns:
        For each layout seconds, and what differs: nothing for the same bits.
    """
    write_documents(results)
    known: dict[str, tuple[float, Measured]] = {}

    def run(name: str) -> tuple[float, Measured]:
        file = results / f"{list(LAYOUTS).index(name)}-{steps}.pickle"
        if name not in known and file.exists():
            known[name] = pickle.loads(file.read_bytes())
        elif name not in known:
            earlier = run(FROM)[1] if name == RESUMED else None
            resume = results / f"{FROM}-{steps}" / str(max(steps // 2, 1)) if earlier else None
            shutil.rmtree(results / f"{name}-{steps}", ignore_errors=True)  # of a run cut short
            begin = time.monotonic()
            found = measure(
                LAYOUTS[name], results, f"{name}-{steps}", steps, resume, keys_of(name, steps)
            )
            if earlier:
                assert len(found.losses) == steps - max(steps // 2, 1), "it was not resumed"
                found = continued(earlier, found)
            known[name] = time.monotonic() - begin, found
            file.write_bytes(pickle.dumps(known[name]))
        return known[name]

    found: dict[str, tuple[float, list[str]]] = {}
    for name in names:
        want, (seconds, got) = run(CUT if is_cut(name) else WHOLE)[1], run(name)
        compare = changed if name == RESUMED else differing
        found[name] = seconds, compare(got, want)
        if log:
            print(f"{name}: {seconds:.0f} s, {found[name][1] or 'bitwise'}", flush=True)
    return found


def line(name: str, seconds: float, faults: list[str]) -> str:
    """Return a row of the table."""
    said = "others" if faults else "-" if name in (WHOLE, CUT) else "bitwise"
    return f"| {name} | {LAYOUTS[name].ranks} | {seconds:.0f} | {said} |"


def not_run(name: str) -> str:
    """Return the row of a layout that was not measured."""
    return f"| {name} | {LAYOUTS[name].ranks} | - | {grid_table.NOT_RUN} |"


def main() -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layouts", nargs="*", help=f"of: {'; '.join(LAYOUTS)} (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run ({STEPS})")
    parser.add_argument("--results", type=Path, help="folder of runs: those there are not repeated")
    given = parser.parse_args()
    names = given.layouts or list(LAYOUTS)
    if unknown := set(names) - LAYOUTS.keys():
        parser.error(f"no layouts: {', '.join(sorted(unknown))}. Choose of {'; '.join(LAYOUTS)}")
    if given.steps < 2:
        parser.error(f"--steps {given.steps}: at least 2, since one run is resumed halfway")
    with tempfile.TemporaryDirectory(prefix="bits-proof-") as folder:
        results = given.results or Path(folder)
        results.mkdir(parents=True, exist_ok=True)
        found = prove(names, given.steps, results)
    if given.steps == STEPS:
        table = re.findall(r"^(\| (.+?) \| .*)$", grid_table.read("long"), re.MULTILINE)
        before = {name: row for row, name in table}
        rows = [line(name, *found[name]) if name in found else before.get(name, not_run(name))
                for name in LAYOUTS]  # fmt: skip
        grid_table.write("long", "\n".join([HEAD, *rows]))
    return int(any(faults for _, faults in found.values()))


if __name__ == "__main__":
    sys.exit(main())
