"""Planned memory is that of the tensors of a real training: state to the byte, the largest instant
within 3 percent. Not by RSS: of small models it is mostly that of libraries and of free memory that
the allocator keeps."""

from __future__ import annotations

import pytest
from live_bytes import measured_step, measured_steps
from own_runs import PRELOAD
from peak_cases import CASES, config_of

from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.memory import instants
from kenotron_cost.recomputed import recomputed
from kenotron_dist import Mesh, spawn
from kenotron_train.run.preview import preview

PAIRS = [name for name in CASES if config_of(name).world_size == 2]


@pytest.fixture(scope="module")
def of_pairs() -> dict[str, tuple[dict[str, int], ...]]:
    """Bytes of both ranks of the configs that have two."""
    configs = [config_of(name) for name in PAIRS]
    ranks = spawn(measured_steps, configs, dp=2, preload=PRELOAD)
    return dict(zip(PAIRS, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_state_and_largest_instant_are_those_of_live_tensors(
    name: str, request: pytest.FixtureRequest
) -> None:
    config = config_of(name)
    plan, pp = cost_plan(config), config.parallelism.pp
    if config.world_size == 2:
        real = request.getfixturevalue("of_pairs")[name]
    else:
        real = (measured_step(Mesh.connect(), config),)
    measured, again = MeasuredModel(plan, exact=True), recomputed(plan)
    for rank in range(pp):
        found = dict(real[rank * len(real) // pp])
        peak, states = found.pop("peak"), measured.states(plan, rank)
        assert {what: states.get(what, 0) for what in found} == found
        most = max(sum(each.values()) for each in instants(plan, measured, again, rank, 0))
        print(f"{name}, pp rank {rank}: planned {most:,}, measured {peak:,}, {most / peak:.4f}")
        assert most == pytest.approx(peak, rel=0.03), (rank, most / peak)


def test_check_shows_the_largest_instant_of_adapters_and_of_sums_of_samples() -> None:
    text = preview(config_of("LoRA"))
    assert "Largest instant: end of a forward" in text and "on pp rank 0; 0.0" in text
    assert "gradients 2.46e-05" in text  # of 6,144 values that learn
    assert "sums of samples 0.0042" in preview(config_of("reproducible"))
