"""Models of transformers whose attention is computed here: rows cut over cp, and documents."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from foreign_models import OTHERS, SEQUENCE, alone, configure, folder_of, run, whole
from torch import nn

from kenotron_config import ConfigError
from kenotron_models import Context, SequenceCut, layers_on_meta, sequence_problem
from kenotron_models.families import TransformersConfig
from kenotron_models.transformers_attention import attend_rows, attending, window_mask

HERE = {"attn_implementation": "kenotron"}
FAMILIES = ("gemma2", "gpt_oss", "deepseek_v3", "mixtral", "llama4_text")
"""Windows, caps, sinks, latent attention, experts, chunks."""
OTHERS_CUT = (
    "qwen3_moe", "glm4_moe", "minimax_m2", "gemma4_text", "ernie4_5", "ernie4_5_moe", "seed_oss",
)  # fmt: skip
CAPPED = {"gemma2": {"attn_logit_softcapping": 0.5}}  # small weights make small scores
CP2 = {"parallelism.cp": 2}
HALF = {"parallelism.dp": 2, "tokens.batch_accumulation_per_replica": 1}
LAYOUTS = {
    "cp2": CP2,
    "cp2 tp2": CP2 | {"parallelism.tp": 2},
    "cp2 pp2 recompute": CP2 | {"parallelism.pp": 2, "parallelism.recompute": "full"},
    "cp2 dp2 zero3": CP2 | HALF | {"optimizer.zero_stage": 3},
}
DOCUMENTS = [*range(5), *range(10), 0, *range(SEQUENCE - 16)]


def close(found: tuple, due: tuple) -> None:
    """Losses to 1e-6, and every gradient by name."""
    assert found[0] == pytest.approx(due[0], rel=1e-6)
    assert {*found[1]} == {*due[1]}
    for name, expected in due[1].items():
        apart = abs(found[1][name] - expected).max()
        assert apart <= 1e-5 * abs(expected).max() + 1e-7, name


@pytest.mark.parametrize(
    ("family", "layout"), [*product(FAMILIES, LAYOUTS), *((each, "cp2") for each in OTHERS_CUT)]
)
def test_rows_cut_over_cp_train_as_plain_transformers(family, layout, tmp_path):
    folder = folder_of(family, tmp_path / "model")
    changes = {"tokens.train_steps": 5, "optimizer.weight_decay": 0.0} | LAYOUTS[layout]
    config = configure(folder, tmp_path / "run", changes, **HERE)
    found = run(config)
    losses, _ = alone(folder, [rate for _, _, rate in found], config)
    assert [loss for loss, _, _ in found] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_cut_rows_and_of_documents_are_those_of_one_process(family, tmp_path):
    folder = folder_of(family, tmp_path / "model", **CAPPED.get(family, {}))
    for positions, keys in ((None, {}), (DOCUMENTS, {"separate_documents": True})):
        separates = positions is None or family != "gpt_oss"  # in transformers it does not
        theirs = {"attn_implementation": "eager"} if separates else HERE
        due = whole(configure(folder, tmp_path / "run", **theirs, **keys), positions)
        for layout in ({}, LAYOUTS["cp2 tp2"]):
            config = configure(folder, tmp_path / "run", layout, **HERE, **keys)
            close(whole(config, positions), due)


def test_documents_of_a_model_that_is_one_layer_over_cp(tmp_path):
    folder = folder_of("gemma3n_text", tmp_path / "model")
    keys = HERE | {"separate_documents": True}
    due = whole(configure(folder, tmp_path / "run", **keys), DOCUMENTS)
    close(whole(configure(folder, tmp_path / "run", CP2, **keys), DOCUMENTS), due)
    one_text = whole(configure(folder, tmp_path / "run", **HERE), DOCUMENTS)
    assert one_text[0] != pytest.approx(due[0], rel=1e-4)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("falcon_h1", "layers.0.mamba.conv1d is a Conv1d: tokens of a falcon_h1 see one another"),
        ("deepseek_v32", "layers.0.self_attn.indexer is a DeepseekV32Indexer: tokens of a"),
        ("bamba", "layers.0 does not call ALL_ATTENTION_FUNCTIONS: tokens of a bamba see one"),
    ],
)
def test_tokens_that_see_one_another_outside_attention_are_named(family, words):
    with pytest.raises(ValueError, match=words):
        layers_on_meta(described(family).decoder)


def described(kind: str, **sizes: object) -> TransformersConfig:
    return TransformersConfig(config_json=json.dumps({"model_type": kind, **sizes}), **HERE)


SMALL = OTHERS["qwen3"]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONGROPE = DYNAMIC | {
    "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def test_models_whose_rows_cannot_be_cut_are_named(tmp_path):
    folder = folder_of("qwen3", tmp_path / "model")
    with pytest.raises(ConfigError, match="cp: 2 was given; .*set attn_implementation to kenotron"):
        configure(folder, tmp_path / "run", CP2)
    folder_of("qwen3", tmp_path / "long", rope_parameters=DYNAMIC)
    words = "cp: 2 was given; rotary_emb: angles of rope_type dynamic depend on .* ranks, or cp to"
    with pytest.raises(ConfigError, match=words):
        configure(tmp_path / "long", tmp_path / "run", CP2, **HERE)
    problem = sequence_problem(described("qwen3", **SMALL, rope_parameters=LONGROPE).decoder) or ""
    assert problem.startswith("rotary_emb: angles of rope_type longrope depend on the positions")
    mixed = SMALL | {"layer_types": ["conv", "full_attention", "conv"], "model_type": "lfm2"}
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(mixed))
    words = "model.layers.0 does not call ALL_ATTENTION_FUNCTIONS: tokens of a lfm2 see .* null"
    with pytest.raises(ConfigError, match=words):
        configure(folder, tmp_path / "run", CP2, **HERE)
    assert sequence_problem(described("qwen3", **SMALL).decoder) is None


def mask(visible, length=8, **options):
    places = torch.arange(length)[None]
    with attending(Context(places), False):
        return int(window_mask(mask_function=lambda b, h, q, k: visible(q, k), **options))


def test_a_mask_is_a_window_or_refused():
    assert mask(lambda q, k: k <= q) == 0
    assert mask(lambda q, k: (k <= q) & (k > q - 3)) == 3
    assert mask(lambda q, k: (k <= q) & (k // 8 == q // 8)) == 0  # chunks as long as the rows
    assert mask(lambda q, k: (k <= q) & (k // 3 == q // 3)) == -3
    others = (lambda q, k: (k <= q) & (k // 4 != q // 4), lambda q, k: q >= 0, lambda q, k: q > k)
    for visible in others:
        with pytest.raises(ValueError, match="is not causal with a window or chunks"):
            mask(visible)
    with pytest.raises(ValueError, match="in rows of 8 tokens, which attn_implementation: k"):
        mask(lambda q, k: k <= q, use_vmap=True)


def test_the_window_is_that_of_whole_rows():
    whole_places = torch.arange(32)[None]

    class Two:
        size, rank = 2, 0

    cut = SequenceCut(Two(), whole_places)
    with attending(Context(whole_places[:, :16], cut=cut), False):
        found = window_mask(mask_function=lambda b, h, q, k: (k <= q) & (k > q - 20))
    assert int(found) == 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_bias": torch.ones(1)}, "Identity calls its attention with position_bias"),
        ({"is_causal": False}, "with a mask that it made itself, which attn_implementation"),
        ({"attention_mask": None}, "with a mask that it made itself"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "with a mask that it made itself"),
    ],
)
def test_what_changes_scores_and_is_not_known_is_refused(changes, words):
    x = torch.randn(1, 2, 4, 8)
    given = {"attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.int64)} | changes
    with attending(Context(torch.arange(4)[None]), False):
        with pytest.raises(ValueError, match=words):
            attend_rows(nn.Identity(), x, x, x, **given)
