"""Variants of attention and of norms: families train on every layout as on one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from engine_cases import ADAMW, batches_of

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import (
    ModelPlan,
    Piece,
    build_training,
    join_pieces,
    training_step,
    weight_pieces,
)
from kenotron_models import DecoderSpec, Recompute
from kenotron_models.families import (
    Gemma2Config,
    Gemma3Config,
    GptOssConfig,
    OLMo3Config,
    Phi3Config,
    SmolLM3Config,
)
from kenotron_models.layers import RopeScaling
from kenotron_tp import TPMode

STEPS = 4
SIZES = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 12,
}  # fmt: skip
TYPES = {"sliding_window": 5, "layer_types": ("sliding_attention", "full_attention")}
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, truncate=False)
FAMILIES: dict[str, Any] = {
    "smollm3": SmolLM3Config(
        **SIZES, **TYPES, use_sliding_window=True, no_rope_layers=(0, 1), mlp_bias=True
    ),
    "phi3": Phi3Config(**SIZES, partial_rotary_factor=0.5, sliding_window=5, resid_pdrop=0.1),
    "olmo3": OLMo3Config(**SIZES, **TYPES),
    "gemma2": Gemma2Config(
        **SIZES, **TYPES, head_dim=8, attn_logit_softcapping=0.5, final_logit_softcapping=1.5
    ),
    "gemma3": Gemma3Config(**SIZES, **TYPES, head_dim=8, final_logit_softcapping=1.5),
    "gpt-oss": GptOssConfig(
        **SIZES, **TYPES, head_dim=8, rope_scaling=YARN, num_local_experts=4,
        num_experts_per_tok=2, swiglu_limit=0.1,
    ),
}  # fmt: skip
LAYOUTS: list[tuple[dict[str, int], TPMode, Recompute]] = [
    ({"tp": 2}, TPMode(), "selective"),
    ({"pp": 2}, TPMode(), "full"),
    ({"cp": 2}, TPMode(), "none"),
    ({"cp": 2, "tp": 2}, TPMode(sequence_parallel=True), "selective"),
]


def documents_apart(spec: DecoderSpec) -> DecoderSpec:
    mixers = (replace(each.mixer, separate_documents=True) for each in spec.blocks)
    pairs = zip(spec.blocks, mixers, strict=True)
    return replace(spec, blocks=tuple(replace(each, mixer=mixer) for each, mixer in pairs))


def trained(
    mesh: Mesh, name: str, mode: TPMode = TPMode(), again: Recompute = "none"
) -> tuple[list[float], list[Piece]]:
    """Losses and norms of some steps, and the weights after them."""
    spec = documents_apart(FAMILIES[name].decoder)
    plan = ModelPlan(spec=spec, mode=mode, recompute=again, draws=(0.3, "NUM_LAYERS"))
    training = build_training(plan, ADAMW, mesh, train_steps=STEPS)
    numbers: list[float] = []
    (batch,) = batches_of(mesh, 1, spec.vocab_size)  # again and again: its loss falls
    batch.positions_MBS[:, ::2, 7:] -= 7  # two documents in every other row
    for step in range(1, STEPS + 1):
        result = training_step(training, batch, step)
        numbers += [result.loss, result.grad_norm]
    return numbers, weight_pieces(training)


@cache
def on_one(name: str) -> tuple[list[float], list[Piece]]:
    return on_ranks(trained, name)[0]


@pytest.mark.parametrize(("axes", "mode", "again"), LAYOUTS, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_on_every_layout_as_on_one_process(
    name: str, axes: dict[str, int], mode: TPMode, again: Recompute
) -> None:
    ep = {"ep": 2} if name == "gpt-oss" and "pp" not in axes else {}
    numbers, pieces = on_one(name)
    assert numbers[-2] < numbers[0]
    ranks = on_ranks(trained, name, mode, again, **axes, **ep)
    exact = axes.keys() == {"pp"}
    for found, _ in ranks:
        assert found == pytest.approx(numbers, rel=0 if exact else 2e-5)
    ours, theirs = join_pieces(each[1] for each in ranks), join_pieces([pieces])
    assert ours.keys() == theirs.keys()
    allowed = 0.0 if exact else 2e-4
    assert all(abs(ours[path] - theirs[path]).max() <= allowed for path in theirs)


def test_sinks_are_trained_and_do_not_decay() -> None:
    (_, pieces) = on_one("gpt-oss")
    sinks = join_pieces([pieces])["layers.0.attention.sinks"]
    assert sinks.shape == (4,) and (sinks != 0).all()
