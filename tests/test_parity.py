"""The same numbers on every layout: each row of the grid against one process.

``grid`` says what a row is, ``grid_check`` what is compared; ``GRID.md`` has what was measured.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import fuzz
import grid
import grid_bits
import grid_check
import grid_choice
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


def one_process(
    row: Row, folder: Path, steps: int, keys: Mapping[str, str] = MappingProxyType({})
) -> grid_run.Measured:
    """A row of one process with further keys, run once for all that ask."""
    name = f"{row}-one-{zlib.crc32(repr((row, dict(keys))).encode())}"  # its name lacks its order
    known = folder / f"{name}.pickle"
    with locked(known.with_suffix(".lock")):
        if not known.exists():
            found = grid_run.measure(row, folder, name, steps, keys=keys)
            known.write_bytes(pickle.dumps(found))
    return pickle.loads(known.read_bytes())


@pytest.mark.by_turns(8)
def test_a_row_has_the_numbers_of_one_process(
    row: Row, folder: Path, full_grid: bool, grid_results: Path | None
) -> None:
    steps, most = (20, 8) if full_grid else (5, max(row.ranks, 4))
    found = grid_check.judge(
        row, folder, steps, lambda model: one_process(model, folder, steps), most
    )
    for run in folder.glob(f"{row}*"):
        shutil.rmtree(run) if run.is_dir() else None
    print(f"\n{grid_table.line(found, grid_table.NOT_RUN)}", end="")
    if grid_results is not None:
        (grid_results / f"{row}.json").write_text(json.dumps(asdict(found)))
    assert not found.faults, f"{row}: " + "; ".join(found.faults)


@pytest.mark.by_turns(2)
def test_a_row_has_the_bits_of_one_process(
    row: Row, folder: Path, grid_results: Path | None
) -> None:
    alone = lambda one, keys: one_process(one, folder, grid_bits.STEPS, keys)  # noqa: E731
    found = grid_bits.judge(row, folder, alone, max(row.ranks, 4))
    for run in folder.glob(f"{row}-bits*"):
        shutil.rmtree(run)
    if grid_results is not None:
        (grid_results / f"{row}.bits.json").write_text(json.dumps(found))
    assert not found, f"{row}: " + "; ".join(found)


def test_the_mode_has_every_row() -> None:
    rows = [row for section in grid.SECTIONS for row in grid_table.rows_of(section)]
    assert {grid_bits.refusal(row) for row in rows} == {""}


def test_a_row_is_verified(row: Row, tmp_path: Path) -> None:
    """By the program, which draws one process from the same config."""
    grid_run.write_documents(tmp_path)
    assert not fuzz.unverified(fuzz.Draw(row), tmp_path, max(row.ranks, 4))


@pytest.mark.parametrize("section", [*grid.SECTIONS, "full"])
def test_the_table_has_these_rows_and_all_of_them_passed(section: str) -> None:
    rows = {str(row) for row in grid_table.rows_of(section)}
    assert grid_table.verdicts(section) == dict.fromkeys(rows, "pass")


def test_chosen_rows_have_every_setting_and_every_two_ways_to_cut() -> None:
    every = [row for section in grid.SECTIONS for row in grid_table.rows_of(section)]
    rows = grid_choice.chosen()
    assert len(rows) == len(set(rows)) < len(every) / 3
    assert {*grid.HAND_PICKED, grid.DONE_WHEN} <= set(rows) <= set(every)
    for name in asdict(rows[0]).keys() - {"sizes", "micro", "cp", "ep"}:
        assert {getattr(row, name) for row in rows} == {getattr(row, name) for row in every}, name
    for one, two in itertools.combinations(("pp", "dp", "cp", "tp", "ep"), 2):
        assert any(row.axes[one] > 1 and row.axes[two] > 1 for row in rows), (one, two)
    staged = {(row.engine, row.zero) for row in rows}
    assert staged == set(itertools.product(grid.ENGINES, grid.SHARDS["zero"]))


def test_cp_goes_with_every_setting_that_it_can_go_with() -> None:
    """Each pair of settings of which one is of cp's axes is in a row of ``context``."""
    rows = grid_table.rows_of("context")
    found = {pair for row in rows for pair in itertools.combinations(asdict(row).items(), 2)}
    axes = {**grid.AXES, **grid.WAYS, "sizes": [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]}
    settings = [(name, value) for name, values in axes.items() for value in values]
    for ours, other in itertools.product(settings, repeat=2):
        if ours[0] not in grid.WAYS or ours[0] == other[0]:
            continue
        if not grid.clash({"cp": 2, **dict([ours, other])}):
            assert {(ours, other), (other, ours)} & found, (ours, other)
    assert {row.cp for row in rows} == {2, 4, 8}
    assert all(row.sequence == grid.CUT_LENGTH for row in rows)


def test_rows_of_eight_ranks_go_on_with_another_cp() -> None:
    turns = {(row.cp, grid_check.elsewhere(row, 8).cp) for row in grid.CUT_BY_HAND}
    assert turns == {(2, 4), (4, 2), (8, 1)}


def test_twenty_steps_cut_over_pp_cp_and_tp_have_the_losses_of_one_process(tmp_path: Path) -> None:
    grid_run.write_documents(tmp_path)
    row = grid.DONE_WHEN
    one, many = (grid_run.measure(each, tmp_path, str(each), 20) for each in (row.model, row))
    assert len(one.losses) == 20 and one.losses[-1] < one.losses[0] - 0.5
    losses, norms = parity.farthest(many.losses, one.losses), parity.farthest(many.norms, one.norms)
    print(f"\nloss {losses:.1e} norm {norms:.1e}", end="")
    assert max(losses, norms) <= BOUND


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
