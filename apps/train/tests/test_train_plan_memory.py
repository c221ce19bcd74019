"""Planned memory is that of the tensors of a real training: state to the byte, the largest instant
within a few percent."""

from __future__ import annotations

import pytest
from live_bytes import measured_step
from own_runs import PRELOAD
from peak_cases import CASES, config_of

from kenotron_dist import Mesh, spawn
from kenotron_train.cost.cost_plan import cost_plan
from kenotron_train.cost.measured import MeasuredModel
from kenotron_train.run.preview import preview


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", CASES)
def test_state_is_that_of_live_tensors(name: str) -> None:
    config = config_of(name)
    plan, sizes = cost_plan(config), config.parallelism
    if config.world_size == 1:
        real = [measured_step(Mesh.connect(), config)]
    else:
        real = spawn(measured_step, config, **sizes.grid, ep=sizes.ep, preload=PRELOAD)
    measured = MeasuredModel(plan, exact=True)
    for rank in range(sizes.pp):
        found = real[rank * config.world_size // sizes.pp]
        del found["peak"]
        states = measured.states(plan, rank)
        assert {what: states.get(what, 0) for what in found} == found


def test_check_shows_the_largest_instant_of_adapters_and_of_sums_of_samples() -> None:
    text = preview(config_of("LoRA"))
    assert "Largest instant: end of a forward" in text and "on pp rank 0; 0.0" in text
    assert "gradients 2.46e-05" in text  # of 6,144 values that learn
    assert "sums of samples 0.0042" in preview(config_of("reproducible"))
