"""Every architecture makes a step on each rank of worlds that do not exist, on meta."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
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
HOST_READS = {
    "cp/src/kenotron_cp/visibility.py": "rows' documents: they are on the host",
    "dist/src/kenotron_dist/fake_world.py": "host_number, which says what meta has",
    "dist/src/kenotron_dist/objects.py": "control messages: on the host, where all ranks are alike",
    "dist/src/kenotron_dist/statistics.py": "a checksum of values: not on meta",
    "dist/src/kenotron_dist/testing.py": "an example in a docstring",
    "dist/src/kenotron_dist/diagnosis/replica_check.py": "a check of values: not on meta",
    "dist/src/kenotron_dist/rng.py": "states of generators, on the host",
    "engine/src/kenotron_engine/device_read.py": "the numbers of a step: 1 on meta",
    "engine/src/kenotron_engine/gathered_tensors.py": "whole tensors for tests: not on meta",
    "engine/src/kenotron_engine/layer_metrics.py": "figures of layers: not on meta",
    "engine/src/kenotron_engine/scoring.py": "evaluation: not on meta",
    "engine/src/kenotron_engine/token_scores.py": "evaluation: not on meta",
    "engine/src/kenotron_engine/sequence.py": "positions of documents, on the host",
    "ep/src/kenotron_ep/exchange.py": "rows of each expert: equally many on meta",
    "ep/src/kenotron_ep/shared_tokens.py": "distinct tokens: the most that can be",
    "models/src/kenotron_models/attention_mask.py": "blocks of documents: not on meta",
    "models/src/kenotron_models/embedding.py": "a constant of the config",
    "models/src/kenotron_models/generate.py": "generation: not on meta",
    "models/src/kenotron_models/hf_tensors.py": "a check of values: not on meta",
    "models/src/kenotron_models/stacked_by_source.py": "rows of each group: shapes alone on meta",
    "models/src/kenotron_models/stacked_linear.py": "rows of each expert: shapes alone on meta",
    "optim/src/kenotron_optim/clip.py": "norms of each gradient, for a replay: not on meta",
    "optim/src/kenotron_optim/nonfinite.py": "the cause of what is not finite: not on meta",
    "optim/src/kenotron_optim/sliced_optimizer.py": "whether a step is left out: no",
    "pp/src/kenotron_pp/p2p.py": "forms of activations: the layers before make them",
    "tp/src/kenotron_tp/embedding.py": "an error's message",
    "tp/src/kenotron_tp/softmax.py": "an error's message",
}
"""Where a library reads a number of a tensor on the host, and what a fake mesh does there."""


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
