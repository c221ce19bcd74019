"""A kind of mixer and a family as a contributor adds them: trained and reported on every layout."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_cases import ADAMW, batches_of

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    LayerMetrics,
    ModelPlan,
    Piece,
    build_training,
    join_pieces,
    training_step,
    weight_pieces,
)

sys.path.append(str(Path(__file__).parents[2] / "kenotron-models/tests"))
from toy_family import ToyConfig

STEPS = 5
LAYOUTS: list[dict[str, int]] = [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}]


def trained(mesh: Mesh) -> tuple[list[float], list[Piece], dict[str, float]]:
    """Losses and norms of some steps, the weights after them, and figures of the last step."""
    config = ToyConfig()
    training = build_training(ModelPlan(spec=config.decoder), ADAMW, mesh, train_steps=STEPS)
    numbers: list[float] = []
    (batch,) = batches_of(mesh, 1, config.vocab_size)  # again and again: its loss falls
    for step in range(1, STEPS + 1):
        layers = LayerMetrics(training)
        with layers.during():
            result = training_step(training, batch, step, look=layers.look)
        numbers += [result.loss, result.grad_norm]
    return numbers, weight_pieces(training), layers.collect()


@cache
def on_one() -> Any:
    return on_ranks(trained)[0]


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_a_toy_mixer_trains_on_every_layout_as_on_one_process(axes: dict[str, int]) -> None:
    numbers, pieces, figures = on_one()
    assert numbers[-2] < numbers[0]
    ranks = on_ranks(trained, **axes)
    ours, theirs = join_pieces(each[1] for each in ranks), join_pieces([pieces])
    for found, _, reported in ranks:
        assert found == pytest.approx(numbers, rel=0 if "tp" not in axes else 1e-5)
        assert reported.keys() == figures.keys()
        assert reported == pytest.approx(figures, rel=1e-3, abs=1e-5)
    assert ours.keys() == theirs.keys()
    allowed = 0.0 if "tp" not in axes else 1e-4
    assert all(abs(ours[name] - theirs[name]).max() <= allowed for name in theirs)


def test_its_parts_are_reported_by_their_names() -> None:
    _, _, figures = on_one()
    components = {name.split("/")[0] for name in figures if name.startswith("global_")}
    assert components == {"global_shift", "global_mlp", "global_norm", "global_global"}
    own = [figures[f"layer_{i}/shift/{part}/norm_l1"] for i in (0, 1) for part in ("read", "write")]
    assert figures["global_shift/norm_l1"] == pytest.approx(sum(own))
    norms = ["layer_0/shift_norm", "layer_0/norm/post_attention_layernorm", "layer_1/shift_norm"]
    own = [figures[f"{name}/norm_l1"] for name in norms]
    assert figures["global_norm/norm_l1"] == pytest.approx(sum(own))
