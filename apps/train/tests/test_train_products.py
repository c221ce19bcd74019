"""Weight-gradient products added to fp32 buffers by the layers: runs with the losses of others."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
from test_train_graphed import batches, curve
from test_train_rollback import PRELOAD

from kenotron_config import DEFAULT_CONFIG
from kenotron_dist import Mesh, deferring, spawn
from kenotron_dist.weight_products import taker_of
from kenotron_engine import training_step
from kenotron_optim import GradAccumulator, partition
from kenotron_train.assemble import build_training
from kenotron_train.config_file import load_config

LAYOUTS = {
    "one": [],
    "recomputed": ["parallelism.recompute_layer=true"],
    "recomputed in part": ["parallelism.recompute=selective"],
    "dp2 tp2, tied": [
        "parallelism.dp=2", "parallelism.tp=2", "model.model_config.tie_word_embeddings=true",
    ],
    "dp2, two chunks split": ["parallelism.dp=2", "parallelism.pp=2", "parallelism.pp_engine=zb-v"],
    "tp2, split": ["parallelism.tp=2", "parallelism.pp=2", "parallelism.pp_engine=zb-h1"],
    "interleaved": ["parallelism.dp=2", "parallelism.pp=2", "parallelism.pp_engine=interleaved"],
}  # fmt: skip


def steps(mesh: Mesh, flags: list[str], taken: bool) -> tuple[list[tuple[float, float]], int]:
    """Losses and norms of four steps; how many weights are taken."""
    flags = ["parallelism.tp=1", "model.dtype=float32", *flags]
    anywhere = functools.partialmethod(GradAccumulator.take_products, anywhere=True)
    with (
        mock.patch.object(partition, "PRODUCT_ROWS", 1),
        mock.patch.object(
            GradAccumulator, "take_products", anywhere if taken else GradAccumulator.take_products
        ),
    ):
        training = build_training(load_config(DEFAULT_CONFIG, flags), mesh)
    takers = sum(taker_of(layer.weight) is not None for layer in deferring(training.model.stack))
    (batch,) = batches(training, 1, 2)
    results = [training_step(training, batch, number) for number in range(1, 5)]
    return [(result.loss, result.grad_norm) for result in results], takers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_gradients(layout: str) -> None:
    flags = LAYOUTS[layout]
    axes = {flag[12:14]: int(flag[15:]) for flag in flags if flag[14:15] == "="}
    plain, taken = (spawn(steps, flags, taken, preload=PRELOAD, **axes) for taken in (False, True))
    for (want, none), (got, takers) in zip(plain, taken, strict=True):
        assert none == 0 and takers >= 4  # nothing is taken on a CPU unless it is asked for
        for (loss, norm), (expected, expected_norm) in zip(got, want, strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-4)


def test_graphs_replay_them() -> None:
    flags = ["parallelism.tp=1", "model.dtype=bfloat16"]
    anywhere = functools.partialmethod(GradAccumulator.take_products, anywhere=True)
    with mock.patch.object(GradAccumulator, "take_products", anywhere):
        plain, weights, _ = curve(Mesh.connect(), flags, graphed=False)
        graphed, found, replays = curve(Mesh.connect(), flags, graphed=True)
    assert replays and graphed == plain
    assert all(found[name].equal(weights[name]) for name in weights)
