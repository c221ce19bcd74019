"""The same numbers on every layout: each row of the grid against one process.

``grid`` says what a row is, ``grid_check`` what is compared; ``GRID.md`` has what was measured.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import grid_check
import grid_run
import grid_table
import parity
import pytest
from grid import Row
from parity import BOUND, Layout, Trace

from kenotron_dist import spawn


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes of pytest out until the block is over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all rows read, and all processes of pytest that run some of them."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "grid"
    with locked(shared / "documents.lock"):
        if not (shared / "documents.jsonl").exists():
            grid_run.write_documents(shared)
    return shared


def one_process(row: Row, folder: Path, steps: int) -> grid_run.Measured:
    """A row of one process, run once for all that ask."""
    kept = folder / f"{row}.pickle"
    with locked(kept.with_suffix(".lock")):
        if not kept.exists():
            kept.write_bytes(pickle.dumps(grid_run.measure(row, folder, f"{row}-one", steps)))
    return pickle.loads(kept.read_bytes())


def test_a_row_has_the_numbers_of_one_process(
    row: Row, folder: Path, full_grid: bool, grid_results: Path | None
) -> None:
    steps, most = (20, 8) if full_grid else (5, max(row.ranks, 4))
    found = grid_check.judge(
        row, folder, steps, lambda model: one_process(model, folder, steps), most
    )
    for run in folder.glob(f"{row}*"):
        shutil.rmtree(run) if run.is_dir() else None
    print(f"\n{grid_table.line(found)}", end="")
    if grid_results is not None:
        (grid_results / f"{row}.json").write_text(json.dumps(asdict(found)))
    assert not found.faults, f"{row}: " + "; ".join(found.faults)


@pytest.mark.parametrize("section", ["sample", "context", "full"])
def test_the_table_has_these_rows_and_all_of_them_passed(section: str) -> None:
    rows = {str(row) for row in grid_table.rows_of(section)}
    assert grid_table.verdicts(section) == dict.fromkeys(rows, "pass")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """One process, 20 steps."""
    folder = tmp_path_factory.mktemp("reference")
    parity.write_text(folder)
    return folder, run(Layout(), folder, 20)


def run(layout: Layout, folder: Path, steps: int, fault: str | None = None) -> Trace:
    config = parity.configure(layout, folder, steps)
    function, extra = (parity.trace, ()) if fault is None else (parity.planted, (fault,))
    sizes = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}
    return spawn(function, config, *extra, **sizes, preload=PRELOAD)[0]


@pytest.mark.xdist_group("parity")
def test_the_reference_learns_and_clips_in_some_steps_only(reference: tuple[Path, Trace]) -> None:
    _, trace = reference
    assert trace.losses[-1] < trace.losses[0] - 0.5
    clipped = [norm > 2.5 for norm in trace.norms]
    assert any(clipped) and not all(clipped)


@pytest.mark.xdist_group("parity")
@pytest.mark.parametrize(
    "fault,layout",
    [
        ("wrong loss scale", Layout(dp=2)),
        ("padded vocabulary gets probability", Layout(tp=2)),
        ("norm counts replicas", Layout(tp=2)),
    ],
)
def test_a_planted_bug_is_seen(fault: str, layout: Layout, reference: tuple[Path, Trace]) -> None:
    folder, want = reference

    def off(got: Trace) -> float:
        return max(
            parity.deviation(got.losses, want.losses), parity.deviation(got.norms, want.norms)
        )

    assert off(run(layout, folder, 3)) <= BOUND
    assert off(run(layout, folder, 3, fault)) > BOUND
