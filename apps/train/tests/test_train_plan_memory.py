"""Planned memory is that of the tensors of a real training: state to the byte, the largest instant
within 3 percent. Not by RSS: of small models it is mostly that of libraries and of free memory that
the allocator keeps."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from live_bytes import measured_step, measured_steps
from own_runs import PRELOAD
from peak_cases import CASES, EXPERTS, LLAMA, config_of

from kenotron_config import Config
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.memory import instants
from kenotron_cost.overheads import communicators
from kenotron_cost.recomputed import recomputed
from kenotron_dist import Mesh, spawn
from kenotron_train.run.preview import preview

TIED = {"tie_word_embeddings": True}
OF_FOUR: list[dict[str, object]] = [
    {"parallelism.dp": 2, "parallelism.tp": 2},
    {"parallelism.tp": 4},  # pairs share a kv head
    {"parallelism.dp": 2, "parallelism.cp": 2},
    {"parallelism.pp": 2, "parallelism.dp": 2},
    {"parallelism.pp": 2, "parallelism.tp": 2, "model.model_config": LLAMA | TIED},
    {"parallelism.dp": 4, "parallelism.ep": 2, "model.model_config": EXPERTS},
    {"parallelism.dp": 4, "optimizer.shard_ranks": 2},
]
PAIRS = [name for name in CASES if config_of(name).world_size == 2]


def groups_made(_: Mesh, configs: list[Config]) -> list[int]:
    """Process groups of several ranks that a training of each config has after three steps."""
    found = []
    for config in configs:
        before = {*dist.distributed_c10d._world.pg_map} - {dist.group.WORLD}
        mesh = Mesh.connect(**config.parallelism.grid, ep=config.parallelism.ep)
        measured_step(mesh, config)
        made = {*dist.distributed_c10d._world.pg_map} - before
        found.append(sum(group.size() > 1 for group in made))
        mesh.close()
    return found


def test_planned_communicators_are_the_groups_of_a_real_training() -> None:
    configs = [config_of(more) for more in OF_FOUR]
    ranks = spawn(groups_made, configs, dp=4, preload=PRELOAD)
    for number, config in enumerate(configs):
        plan = cost_plan(config)
        stages = [communicators(plan, MeasuredModel(plan), n) for n in range(plan.parallelism.pp)]
        want = [stages[rank * len(stages) // 4] for rank in range(4)]
        assert [found[number] for found in ranks] == want, OF_FOUR[number]


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
        if config.parallelism.cp > 1:  # threads of gloo let go of what was sent later or sooner
            peak = min(each["peak"] for each in real)
        most = max(sum(each.values()) for each in instants(plan, measured, again, rank))
        print(f"{name}, pp rank {rank}: planned {most:,}, measured {peak:,}, {most / peak:.4f}")
        assert most == pytest.approx(peak, rel=0.03), (rank, most / peak)


def test_check_shows_the_largest_instant_of_adapters_and_of_sums_of_samples() -> None:
    text = preview(config_of("LoRA"))
    assert "Largest instant: end of a forward" in text and "on pp rank 0; 0.0" in text
    assert "gradients 2.46e-05" in text  # of 6,144 values that learn
    assert "sums of samples 0.0042" in preview(config_of("reproducible"))
