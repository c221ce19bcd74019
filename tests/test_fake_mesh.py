"""Every architecture makes a step on each rank of worlds that do not exist, on meta."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from host_reads import HOST_READS
from test_shards_of_families import OPTIMIZER, STEPS, batches, configs

from kenotron_dist import Mesh
from kenotron_dist.diagnosis import Entry, first_divergence, record
from kenotron_dist.testing import on_fake_ranks
from kenotron_engine import ModelPlan, build_training, training_step
from kenotron_models import TransformersSpec, expert_layers

ROOT = Path(__file__).parent.parent
LAYOUTS: list[dict[str, int]] = [
    {"pp": 2, "dp": 2, "tp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "ep": 2},
]
PARTS = 2
"""Of the architectures, of which a day has one."""


def made(mesh: Mesh, spec: Any) -> list[Entry]:
    """Communications of the first weights and of one step."""
    plan = ModelPlan(spec=spec, draws=(0.1, "NUM_LAYERS"), dtype=torch.bfloat16)
    with record(mesh) as recorder:
        training = build_training(plan, replace(OPTIMIZER, zero_stage=2), mesh, STEPS)
        result = training_step(training, batches(mesh)[0].to(mesh.device), 1)
    assert not result.skipped
    assert all(p.is_meta for p in training.parameters().values())
    return recorder.entries


def refused(spec: Any, layout: dict[str, int]) -> bool:
    """Whether the family cannot be cut so, which it says."""
    joint = any(each.router.balances_all_layers for each in expert_layers(spec).values())
    foreign = isinstance(spec, TransformersSpec)
    return (foreign and "tp" in layout) or (joint and "pp" in layout)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_architecture_makes_a_step_on_every_rank(layout: dict[str, int], part: int) -> None:
    found = {}
    for name, config in list(configs().items())[part::PARTS]:
        if refused(config.decoder, layout) or (
            "ep" in layout and not expert_layers(config.decoder)
        ):
            continue
        records = on_fake_ranks(made, config.decoder, **layout)
        assert not first_divergence(dict(enumerate(records))), name
        found[name] = min(map(len, records))
    assert min(found.values()) > 5
    assert PARTS * len(found) >= (4 if "ep" in layout else 20)


def test_whoever_reads_a_number_of_a_tensor_is_known() -> None:
    reads = (".item()", ".tolist()", ".cpu()")
    found = {
        str(file.relative_to(ROOT / "packages")).removeprefix("kenotron-")
        for file in (ROOT / "packages").glob("*/src/**/*.py")
        if any(each in file.read_text() for each in reads)
        and not any(name in file.parts for name in ("kenotron-data", "kenotron-ckpt"))
    }
    assert found == HOST_READS.keys()
