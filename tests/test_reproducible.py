"""The reproducible mode beyond the rows of the grid: sizes of 3, Muon, and many steps."""

from __future__ import annotations

from pathlib import Path

import grid_bits
import pytest
from grid import Row
from grid_run import Measured, measure, write_documents

LONG = 16
MODE = "general.reproducible"
ROWS = (
    Row(sizes=(1, 3, 1), arch="starcoder2", dtype="bf16", zero=3, micro=1),
    Row(sizes=(1, 3, 1), arch="qwen2_moe_limited", layers=6, recompute="selective"),
    Row(sizes=(3, 1, 1), engine="zb-h1", arch="mistral", attention="blocked", micro=2),
    Row(sizes=(2, 3, 1), engine="zb-v", arch="hybrid", layers=6, documents="separate", zero=0),
    Row(sizes=(1, 1, 4), mode="sp", tied=True, layers=6, vocab=264, attention="plain"),
    Row(sizes=(1, 2, 1), cp=2, way="ulysses", extra="muon", arch="starcoder2", dropout=0.2,
        zero=3, recompute="full", saver="datastates"),
    Row(sizes=(2, 1, 2), extra="muon", arch="qwen3", mode="sp+overlap", zero=0, tied=True),
    Row(sizes=(1, 4, 1), ep=2, extra="muon", arch="qwen2_moe", zero=1),
    Row(sizes=(2, 1, 2), ep=2, engine="zb-h1", arch="qwen2_moe", mode="sp", zero=3,
        recompute="selective"),
    Row(sizes=(1, 1, 2), cp=2, mode="sp", arch="starcoder2", dropout=0.2, tied=True, vocab=257,
        zero=2, recompute="mixer", documents="joined", order="contiguous"),
)  # fmt: skip
"""With a z-loss, windows, norms of heads, capacity and jitter; averages of weights and spikes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("reproducible")
    write_documents(found)
    return found


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("further", ROWS, ids=str)
def test_a_further_row_has_the_bits_of_one_process(further: Row, folder: Path) -> None:
    def alone(one: Row, keys: grid_bits.Keys) -> Measured:
        return measure(one, folder, f"{further}-one", grid_bits.STEPS, keys=keys)

    assert not grid_bits.judge(further, folder, alone, max(further.ranks, 4))


def test_rounding_grows_and_in_the_mode_there_is_none(folder: Path) -> None:
    row = Row(tied=True, sizes=(2, 2, 1), engine="zb-h1", micro=2)
    one = grid_bits.alone(row)
    keys = [grid_bits.keys(each, row) for each in (one, row)]
    runs = [
        measure(each, folder, f"long-{mode}-{n}", LONG, keys={**keys[n], MODE: mode})
        for mode in ("false", "true")
        for n, each in enumerate((one, row))
    ]
    losses = zip(runs[0].losses, runs[1].losses, strict=True)
    assert max(abs(a / b - 1) for a, b in losses) > 0
    assert not grid_bits.differing(runs[3], runs[2])
