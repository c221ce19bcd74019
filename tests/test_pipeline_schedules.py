"""Every pipeline schedule under the whole training: beside dp and tp, tied, through checkpoints."""

from __future__ import annotations

from pathlib import Path

import parity
import pytest
from parity import Layout, Trace

from kenotron_dist import spawn

PRELOAD = ("torch._dynamo", "kenotron_train.loop")
STEPS = 3
ENGINES = ["afab", "1f1b", "interleaved", "zb-h1", "zb-v"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schedules")
    parity.write_text(path)
    return path


def run(layout: Layout, folder: Path) -> Trace:
    config = parity.configure(layout, folder, STEPS)
    sizes = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}
    traces = spawn(parity.trace, config, **sizes, preload=PRELOAD)
    assert all(trace == traces[0] for trace in traces)
    return traces[0]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Trace:
    return run(Layout(tied=True), folder)


@pytest.fixture(scope="module")
def uncut(folder: Path) -> Trace:
    return run(Layout(dp=2, tp=2, tied=True, sequence_parallel=True), folder)


@pytest.mark.parametrize("engine", ENGINES[2:])
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule_trains_as_one_process(
    engine: str, pp: int, folder: Path, alone: Trace
) -> None:
    assert run(Layout(pp=pp, tied=True, engine=engine), folder) == alone


@pytest.mark.parametrize("engine", ENGINES)
def test_no_schedule_changes_a_bit_beside_dp_and_tp(
    engine: str, folder: Path, uncut: Trace
) -> None:
    layout = Layout(pp=2, dp=2, tp=2, tied=True, sequence_parallel=True, engine=engine)
    assert run(layout, folder) == uncut
