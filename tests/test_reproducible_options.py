"""The reproducible mode with options of a training: the bits of one process, resumed, too.

Dropout, Muon, averages of weights, spikes, a further prediction and µP.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_reproducible
from grid import Row
from grid_check import changed, continued
from grid_run import saved_after
from test_reproducible import ALONE, STEPS, Cut, Run, differing, fitting

run = test_reproducible.run
MODELS = (
    Row(arch="starcoder2", dropout=0.2, extra="muon"),
    Row(arch="llama", extra="mtp", layers=6, dtype="bf16"),
    Row(arch="qwen3", extra="mup", tied=True),
    Row(arch="qwen2_moe", extra="mtp", tied=True, layers=6),
)
CUTS = (
    Cut(dp=2, zero=3, micro_batch=3, recompute="full", saver="datastates"),
    Cut(pp=2, dp=2, engine="zb-v", zero=2, recompute="selective"),
    Cut(tp=2, pp=2, zero=0, mode="sp+overlap", micro_batch=2),
    Cut(pp=3, engine="zb-h1", micro_batch=4),
    Cut(tp=4, zero=1, mode="sp", recompute="mixer", most=8),
    Cut(dp=4, ep=2, zero=1, micro_batch=3),
)
IN_CHUNKS = (
    Cut(cp=2, most=1, most_cp=4, zero=0, micro_batch=3, recompute="full"),
    Cut(dp=2, cp=2, most=1, most_cp=4, zero=3, way="ulysses", recompute="selective"),
)


def cases() -> list[tuple[Row, Cut]]:
    """Every model with every cut that it can have; samples in chunks have no further prediction."""
    found = [(model, cut) for model in MODELS for cut in CUTS if fitting(cut, model) == cut]
    return found + [(m, cut) for m in MODELS for cut in IN_CHUNKS if m.extra != "mtp"]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(("model", "cut"), cases(), ids=str)
def test_an_option_has_the_bits_of_one_process(model: Row, cut: Cut, run: Run) -> None:
    alone = replace(ALONE, most=cut.most, most_cp=cut.most_cp)
    want, got = run(model, alone), run(model, cut)
    assert got.gradients and not differing(got, want)
    others = IN_CHUNKS if cut in IN_CHUNKS else CUTS
    other = others[(others.index(cut) + 1) % len(others)]
    other = fitting(replace(other, most=cut.most, most_cp=cut.most_cp), model)
    again = run(model, other, after=cut)
    assert len(again.losses) == STEPS - saved_after(STEPS)
    assert not changed(continued(got, again), want)
