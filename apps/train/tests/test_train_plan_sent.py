"""Bytes that a rank sends in a whole step, by axis: planned, and those of a real training."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from own_runs import PRELOAD
from peak_cases import COMMON, EXPERTS, LLAMA

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.measured import MeasuredModel
from kenotron_cost.recomputed import recomputed
from kenotron_data import Cursor
from kenotron_dist import Mesh, spawn
from kenotron_dist.diagnosis import record
from kenotron_engine import training_step
from kenotron_train.assemble import build_training, data_plan
from kenotron_train.config_file import load_config
from kenotron_train.data.stage_dataset import open_corpus, open_loader

SCALARS = 2048
"""Bytes of norms, losses and loads of routers, which no plan counts; steps send megabytes."""
TP, DP = {"parallelism.tp": 2}, {"parallelism.dp": 2}
TIED = LLAMA | {"tie_word_embeddings": True, "vocab_size": 509, "num_key_value_heads": 1}
CASES: dict[str, dict[str, object]] = {
    "tp": TP,
    "tp, one key head, tied": TP | {"model.model_config": TIED},
    "tp, sequence": TP | {"parallelism.tp_mode": "REDUCE_SCATTER"},
    "tp, sequence, bf16, recompute full": TP
    | {"parallelism.tp_mode": "REDUCE_SCATTER", "model.dtype": "bfloat16"}
    | {"parallelism.recompute": "full"},
    "dp, ZeRO 1": DP | {"optimizer.zero_stage": 1},
    "dp, ZeRO 2": DP | {"optimizer.zero_stage": 2},
    "dp, ZeRO 3": DP | {"optimizer.zero_stage": 3},
    "dp, ZeRO 3, LoRA": DP
    | {"model.adapter": {"rank": 4, "alpha": 8, "targets": ["all"]}, "optimizer.zero_stage": 3},
    "cp": {"parallelism.cp": 2},
    "experts, tp and ep": TP | {"parallelism.ep": 2, "model.model_config": EXPERTS},
}


def config_of(name: str) -> Config:
    values = COMMON | {"model.model_config": LLAMA} | CASES[name]
    flags = [f"{k}={json.dumps(v) if isinstance(v, dict) else v}" for k, v in values.items()]
    return load_config(DEFAULT_CONFIG, flags)


def recorded(_: Mesh, configs: list[Config]) -> list[dict[str, int]]:
    """Bytes of the third step of each config, by axis."""
    found = []
    for config in configs:
        sizes, plan = config.parallelism, data_plan(config)
        mesh = Mesh.connect(**sizes.grid, ep=sizes.ep)
        training = build_training(config, mesh)
        with open_loader(plan, mesh, open_corpus(plan, 0), Cursor()) as loader:
            for number in (1, 2):
                training_step(training, next(loader), number)
            batch = next(loader)
            with record(mesh) as recorder:
                training_step(training, batch, 3)
            training.optimizer.settle()
        sent = recorder.bytes_per_axis()
        sent.pop("world", None)
        found.append(dict(sent))
    return found


@pytest.fixture(scope="module")
def of_steps() -> dict[str, dict[str, int]]:
    """What the first of two ranks sends."""
    ranks = spawn(recorded, [config_of(name) for name in CASES], dp=2, preload=PRELOAD)
    return dict(zip(CASES, ranks[0], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_step_sends_what_is_planned(name: str, of_steps: dict[str, dict[str, int]]) -> None:
    plan = cost_plan(config_of(name))
    planned = Counter(MeasuredModel(plan, exact=True).sent_by_stage(plan, 0, recomputed(plan)))
    if plan.parallelism.cp > 1:  # ranks of cp are those of its gradients, too
        planned["cp"] += planned.pop("dp")
    for axis, size in of_steps[name].items():
        # Where tokens go is not known before.
        room = SCALARS if axis != "ep" else planned[axis] // 10
        assert abs(size - planned[axis]) <= room, (axis, size, planned[axis])
        assert size >= planned[axis] or axis == "ep", (axis, size, planned[axis])
    assert {*planned} <= {*of_steps[name]}
