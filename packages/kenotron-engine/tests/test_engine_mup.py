"""Parametrisation by widths: the same numbers on every layout, and standard at base width."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from engine_cases import ADAMW, LLAMA, batches_of

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    ModelPlan,
    Piece,
    build_model,
    build_training,
    decoder_layers,
    join_pieces,
    training_step,
    weight_pieces,
)
from kenotron_models import Mup, MupOptimizer, multipliers_of, mup_scales
from kenotron_optim import AdamWConfig, MuonConfig, SGDConfig
from kenotron_tp import TPMode

STEPS = 4
RULES: dict[MupOptimizer, AdamWConfig | MuonConfig | SGDConfig] = {
    "adamw": ADAMW.optimizer_factory, "sgd": SGDConfig(momentum=0.9), "muon": MuonConfig(),
}  # fmt: skip


def plan(optimizer: MupOptimizer, *, tied: bool = True, wide: int = 2) -> ModelPlan:
    """A model that is ``wide`` times as wide as its base, whose kv heads grow under SGD alone."""
    kv = {"num_key_value_heads": 2 if optimizer == "adamw" else 2 // wide}
    config = replace(LLAMA, tie_word_embeddings=tied)
    base = replace(
        config, hidden_size=16 // wide, intermediate_size=24 // wide,
        num_attention_heads=4 // wide, **kv,
    ).decoder  # fmt: skip
    mup = Mup(base=base, base_depth=1 if wide > 1 else 2, depth_rule="inverse_sqrt")
    spec = config.decoder
    given = multipliers_of(spec, mup, embedding=1.5 if wide > 1 else 1.0)
    scales = mup_scales(spec, mup, optimizer, 0.3)
    return ModelPlan(spec=given.applied(spec), draws=(0.3, "NUM_LAYERS"), scales=scales)


def trained(
    mesh: Mesh, of: ModelPlan, optimizer: MupOptimizer, mode: TPMode = TPMode()
) -> tuple[list[float], list[Piece]]:
    """Losses and norms of some steps, and the weights after them."""
    optim = replace(ADAMW, optimizer_factory=RULES[optimizer])
    training = build_training(replace(of, mode=mode), optim, mesh, train_steps=STEPS)
    numbers: list[float] = []
    for step, batch in enumerate(batches_of(mesh, STEPS), 1):
        result = training_step(training, batch, step)
        numbers += [result.loss, result.grad_norm]
    return numbers, weight_pieces(training)


@cache
def on_one(optimizer: MupOptimizer, tied: bool) -> tuple[list[float], list[Piece]]:
    return on_ranks(trained, plan(optimizer, tied=tied), optimizer)[0]


@pytest.mark.parametrize(
    ("optimizer", "tied", "axes", "mode"),
    [
        ("adamw", True, {"pp": 2, "dp": 2, "tp": 2}, TPMode()),
        ("adamw", False, {"pp": 2, "dp": 2, "tp": 2}, TPMode(sequence_parallel=True)),
        ("sgd", True, {"tp": 2, "dp": 2}, TPMode()),
        ("muon", False, {"tp": 2, "dp": 2}, TPMode()),
    ],
    ids=str,
)
def test_every_layout_trains_as_one_process(
    optimizer: MupOptimizer, tied: bool, axes: dict[str, int], mode: TPMode
) -> None:
    numbers, pieces = on_one(optimizer, tied)
    ranks = on_ranks(trained, plan(optimizer, tied=tied), optimizer, mode, **axes)
    for found, _ in ranks:
        assert found == pytest.approx(numbers, rel=2e-5)
    ours, theirs = join_pieces(each[1] for each in ranks), join_pieces([pieces])
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[path] - theirs[path]).max() <= 2e-4 for path in theirs)


@pytest.mark.parametrize("optimizer", RULES)
def test_at_base_width_a_run_is_the_standard_one_to_the_bit(optimizer: MupOptimizer) -> None:
    same = plan(optimizer, wide=1)
    numbers, pieces = on_ranks(trained, same, optimizer)[0]
    standard, wanted = on_ranks(trained, replace(same, scales=None), optimizer)[0]
    assert numbers == standard
    ours, theirs = join_pieces([pieces]), join_pieces([wanted])
    assert all((ours[path] == theirs[path]).all() for path in theirs)
    assert on_one(optimizer, True)[0] != standard


def test_groups_have_the_factors_of_their_parameters() -> None:
    of = plan("adamw", tied=False)
    training = build_training(of, ADAMW, Mesh.connect(), train_steps=STEPS)
    found = {name: group for group in training.groups for name in group.names}
    assert of.scales is not None and found.keys() == of.scales.keys()
    for name, own in of.scales.items():
        assert found[name].lr_multiplier == pytest.approx(own.lr)
        assert found[name].weight_decay == pytest.approx(0.1 / own.lr)
    inner = found["layers.1.mlp.down.weight"]
    assert inner.lr_multiplier == pytest.approx(0.5 / 2**0.5)
    assert found["head.weight"].lr_multiplier == found["norm.weight"].lr_multiplier == 1.0


def test_layers_of_another_model_have_no_known_widths() -> None:
    mesh, of = Mesh.connect(), plan("adamw")
    with pytest.raises(ValueError, match="scales were given for layers that are not of the plan's"):
        build_model(of, mesh, decoder_layers(of, mesh))
