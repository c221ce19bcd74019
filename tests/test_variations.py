"""Variations of the model and of the step: the same numbers on every layout, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
import pytest
from parity import BOUND, Layout, Trace

from kenotron_dist import spawn
from kenotron_models import (
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Recompute,
    RopeScaling,
    Starcoder2Config,
)
from kenotron_models.registry import AnyConfig

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


def run(
    layout: Layout,
    folder: Path,
    model: dict[str, Any] | AnyConfig,
    recompute: Recompute = "none",
    compiled: bool = False,
) -> Trace:
    """The trace of a layout of a changed model, or of another one."""
    config = parity.configure(layout, folder, STEPS)
    sizes = replace(config.model.model_config, **model) if isinstance(model, dict) else model
    config = replace(
        config,
        model=replace(config.model, model_config=sizes, compile=compiled),
        parallelism=replace(config.parallelism, recompute=recompute),
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
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 16,
}  # fmt: skip
FAMILIES = {
    "mistral": MistralConfig(**SIZES, sliding_window_size=4),
    "qwen2": Qwen2Config(
        **SIZES, attention_bias=True, tie_word_embeddings=True, use_doc_masking=True,
        sliding_window_size=6, no_rope_layer=3, rope_seq_len_interpolation_factor=2.0,
    ),
    "qwen3": Qwen3Config(
        **SIZES, head_dim=16, rope_interleaved=True,
        rope_scaling=RopeScaling(factor=4.0, rope_type="yarn", original_max_position_embeddings=8),
    ),
    "starcoder2": STARCODER,
    "learned positions": replace(
        STARCODER, use_position_embeddings=True, use_rotary_embeddings=False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_same_numbers_on_eight_ranks(name: str, folder: Path) -> None:
    many = replace(MANY, pp=2, dp=1, tp=4)
    traces = [run(layout, folder, FAMILIES[name]) for layout in (Layout(), MANY, many)]
    for trace in traces[1:]:
        losses = parity.deviation(trace.losses, traces[0].losses)
        norms = parity.deviation(trace.norms, traces[0].norms)
        print(f"\n{name}: loss {losses:.1e} norm {norms:.1e}", end="")
        assert max(losses, norms) <= BOUND


def test_dropout_is_the_same_wherever_layers_lie(folder: Path) -> None:
    one = run(Layout(), folder, STARCODER)
    assert run(Layout(pp=2, engine="zb-h1"), folder, STARCODER) == one
    assert run(Layout(), folder, replace(STARCODER, resid_pdrop=0.0)) != one
    assert run(Layout(), folder, replace(STARCODER, embd_pdrop=0.0)) != one


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("engine", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("model", [{}, STARCODER], ids=["llama", "starcoder2"])
def test_computing_activations_again_changes_no_bit(
    model: dict[str, Any] | AnyConfig, engine: str, recompute: Recompute, folder: Path
) -> None:
    layout = Layout(pp=2, tp=2, tied=True, engine=engine, sequence_parallel=True)
    assert run(layout, folder, model, recompute) == run(layout, folder, model)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (Layout(tp=2, tied=True, sequence_parallel=True), "selective"),
        (Layout(tp=2, overlap=True), "full"),
        (Layout(pp=2, engine="zb-h1"), "none"),
    ],
    ids=str,
)
def test_compiled_layers_compute_the_same(
    layout: Layout, recompute: Recompute, folder: Path
) -> None:
    compiled = run(layout, folder, {}, recompute, compiled=True)
    plain = run(layout, folder, {})
    losses = parity.deviation(compiled.losses, plain.losses)
    norms = parity.deviation(compiled.norms, plain.norms)
    print(f"\ncompiled, {recompute}: loss {losses:.1e} norm {norms:.1e}", end="")
    assert max(losses, norms) <= BOUND


def test_the_reported_loss_is_the_cross_entropy_alone(folder: Path) -> None:
    layout = Layout(pp=2, tied=True)
    plain, regular = run(layout, folder, {}), run(layout, folder, Z_LOSS)
    assert regular.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert regular.norms[0] != plain.norms[0]
