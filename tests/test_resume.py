"""A run that was saved behind the training and resumed is the run that never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import parity
import pytest
from parity import Layout, Trace

from kenotron_dist import spawn

pytestmark = pytest.mark.xdist_group("resume")  # what all of them share is made once
PRELOAD = ("torch._dynamo", "kenotron_train.loop")
STEPS, SAVED = 8, 4
BOUND = 1e-6
"""Relative deviation of losses and norms after a change of layout."""
LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True, tied=True),
    Layout(dp=2, zero=1),
    Layout(pp=2, tied=True),
    Layout(pp=2, dp=2, tp=2, tied=True, sequence_parallel=True, zero=1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume")
    parity.write_text(path)
    return path


def train(layout: Layout, folder: Path, run: str, resume: Path | None = None) -> Trace:
    """Train with a save in the middle, behind the steps that follow it."""
    config = parity.configure(layout, folder, STEPS)
    checkpoints = replace(
        config.checkpoints,
        checkpoints_path=str(folder / run),
        checkpoint_interval=SAVED,
        checkpointing_engine="datastates",
        verify_after_write=True,
        on_save_failure="raise",
        resume_checkpoint_path=None if resume is None else str(resume),
    )
    config = replace(config, checkpoints=checkpoints)
    sizes = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}
    return spawn(parity.trace, config, **sizes, preload=PRELOAD)[0]


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> dict[Layout, Trace]:
    """Every layout's whole run, with a checkpoint after step 4 in a folder of its own."""
    return {layout: train(layout, folder, f"whole {layout}") for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_on_the_same_layout_not_a_bit_changes(
    layout: Layout, folder: Path, uninterrupted: dict[Layout, Trace]
) -> None:
    want = uninterrupted[layout]
    got = train(layout, folder, f"again {layout}", folder / f"whole {layout}" / str(SAVED))
    assert got.losses == want.losses[SAVED:]
    assert got.norms == want.norms[SAVED:]


PAIRS = [
    (0, 4), (4, 0), (1, 3), (3, 1), (2, 4), (4, 2), (1, 4), (4, 3),
]  # fmt: skip


@pytest.mark.parametrize(("written", "read"), PAIRS)
def test_on_another_layout_the_numbers_go_on(
    written: int, read: int, folder: Path, uninterrupted: dict[Layout, Trace]
) -> None:
    source = LAYOUTS[written]
    target = replace(LAYOUTS[read], tied=source.tied)
    checkpoint = folder / f"whole {source}" / str(SAVED)
    got = train(target, folder, f"{written} to {read}", checkpoint)
    losses = parity.deviation(got.losses, uninterrupted[source].losses[SAVED:])
    norms = parity.deviation(got.norms, uninterrupted[source].norms[SAVED:])
    print(f"\n{source!s} -> {target!s}: loss {losses:.1e} norm {norms:.1e}", end="")
    assert losses <= BOUND
    assert norms <= BOUND
