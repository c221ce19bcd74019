"""Variations of the model and of the step: the same numbers on every layout, too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
from parity import BOUND, Layout, Trace

from kenotron_config import Config
from kenotron_dist import Mesh, spawn
from kenotron_models import AnyConfig, Recompute
from kenotron_models.families import Starcoder2Config

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")
STEPS = 6
MANY = Layout(pp=2, dp=2, tp=2, tied=True, sequence_parallel=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("variations")
    parity.write_text(path)
    return path


def run(
    layout: Layout,
    folder: Path,
    model: dict[str, Any] | AnyConfig,
    recompute: Recompute = "none",
    compiled: str = "",
) -> Trace:
    """The trace of a layout of a changed model, or of another one; by which compiler."""
    config = parity.configure(layout, folder, STEPS)
    sizes = replace(config.model.model_config, **model) if isinstance(model, dict) else model
    config = replace(
        config,
        model=replace(config.model, model_config=sizes, compile=bool(compiled)),
        parallelism=replace(config.parallelism, recompute=recompute),
    )
    sizes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    traces = spawn(traced, config, compiled, **sizes, preload=PRELOAD)
    assert all(trace == traces[0] for trace in traces), "ranks report different numbers"
    return traces[0]


def traced(mesh: Mesh, config: Config, compiler: str) -> Trace:
    with mock.patch("torch.compile", partial(torch.compile, backend=compiler)):
        return parity.trace(mesh, config)


STARCODER = Starcoder2Config(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=5,
    num_attention_heads=8,
    grouped_query=True,
    num_kv_heads=2,
    vocab_size=257,
    max_position_embeddings=16,
    sliding_window_size=5,
    global_attn_layers=(1,),
)


def test_learned_positions_give_the_same_numbers_on_eight_ranks(folder: Path) -> None:
    model = replace(STARCODER, use_position_embeddings=True, use_rotary_embeddings=False)
    one, many = (run(layout, folder, model) for layout in (Layout(), MANY))
    losses = parity.deviation(many.losses, one.losses)
    norms = parity.deviation(many.norms, one.norms)
    print(f"\nloss {losses:.1e} norm {norms:.1e}", end="")
    assert max(losses, norms) <= BOUND


def test_dropout_is_the_same_wherever_layers_lie(folder: Path) -> None:
    one = run(Layout(), folder, STARCODER)
    assert run(Layout(pp=2, engine="zb-h1"), folder, STARCODER) == one
    assert run(Layout(), folder, replace(STARCODER, resid_pdrop=0.0)) != one
    assert run(Layout(), folder, replace(STARCODER, embd_pdrop=0.0)) != one


@pytest.mark.parametrize(
    ("model", "engine", "recompute"),
    [({}, "1f1b", "selective"), (STARCODER, "zb-h1", "full")],
    ids=["llama", "starcoder2"],
)
def test_computing_activations_again_changes_no_bit(
    model: dict[str, Any] | AnyConfig, engine: str, recompute: Recompute, folder: Path
) -> None:
    layout = Layout(pp=2, tp=2, tied=True, engine=engine, sequence_parallel=True)
    assert run(layout, folder, model, recompute) == run(layout, folder, model)


@pytest.mark.parametrize(
    ("layout", "recompute", "compiler"),
    [
        (Layout(tp=2, tied=True, sequence_parallel=True), "selective", "inductor"),
        (Layout(tp=2, overlap=True), "full", "aot_eager"),
        (Layout(pp=2, engine="zb-h1"), "none", "aot_eager"),
        (Layout(cp=2), "selective", "aot_eager"),
    ],
    ids=str,
)
def test_compiled_layers_compute_the_same(
    layout: Layout, recompute: Recompute, compiler: str, folder: Path
) -> None:
    compiled = run(layout, folder, {}, recompute, compiler)
    plain = run(layout, folder, {})
    losses = parity.deviation(compiled.losses, plain.losses)
    norms = parity.deviation(compiled.norms, plain.norms)
    print(f"\ncompiled, {recompute}: loss {losses:.1e} norm {norms:.1e}", end="")
    assert max(losses, norms) <= BOUND


def test_the_reported_loss_is_the_cross_entropy_alone(folder: Path) -> None:
    layout = Layout(pp=2, tied=True)
    z_loss = {"z_loss_enabled": True, "z_loss_coefficient": 0.01}
    plain, regular = run(layout, folder, {}), run(layout, folder, z_loss)
    assert regular.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert regular.norms[0] != plain.norms[0]
