"""Variations of the model and of the step: the same numbers on every layout, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
import pytest
from parity import BOUND, Layout, Trace

from kenotron_dist import spawn
from kenotron_models import RopeScaling

PRELOAD = ("torch._dynamo", "kenotron_train.loop")
STEPS = 6
MANY = Layout(pp=2, dp=2, tp=2, tied=True, sequence_parallel=True)
SCALED = {"rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=16)}
Z_LOSS = {"z_loss_enabled": True, "z_loss_coefficient": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("variations")
    parity.write_text(path)
    return path


def run(layout: Layout, folder: Path, model: dict[str, Any], recompute: bool = False) -> Trace:
    """The trace of a layout of a changed model."""
    config = parity.configure(layout, folder, STEPS)
    config = replace(
        config,
        model=replace(config.model, model_config=replace(config.model.model_config, **model)),
        parallelism=replace(config.parallelism, recompute_layer=recompute),
    )
    sizes = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}
    traces = spawn(parity.trace, config, **sizes, preload=PRELOAD)
    assert all(trace == traces[0] for trace in traces), "ranks report different numbers"
    return traces[0]


@pytest.mark.parametrize(
    "model",
    [SCALED, {"attention_bias": True}, Z_LOSS, SCALED | Z_LOSS | {"attention_bias": True}],
    ids=["rope", "bias", "z-loss", "all"],
)
def test_a_variation_gives_the_same_numbers_on_eight_ranks(
    model: dict[str, Any], folder: Path
) -> None:
    one, many = (run(layout, folder, model) for layout in (Layout(tied=True), MANY))
    losses = parity.deviation(many.losses, one.losses)
    norms = parity.deviation(many.norms, one.norms)
    print(f"\n{model}: loss {losses:.1e} norm {norms:.1e}", end="")
    assert losses <= BOUND
    assert norms <= BOUND
    assert one != run(Layout(tied=True), folder, {})


@pytest.mark.parametrize("engine", ["1f1b", "zb-h1"])
def test_computing_activations_again_changes_no_bit(engine: str, folder: Path) -> None:
    layout = Layout(pp=2, tp=2, tied=True, engine=engine, sequence_parallel=True)
    assert run(layout, folder, {}, recompute=True) == run(layout, folder, {})


def test_the_reported_loss_is_the_cross_entropy_alone(folder: Path) -> None:
    layout = Layout(pp=2, tied=True)
    plain, regular = run(layout, folder, {}), run(layout, folder, Z_LOSS)
    assert regular.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert regular.norms[0] != plain.norms[0]
