"""``small`` of every causal family of transformers: narrow, and of the same kinds of layers."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from tiny_transformers import OF_FAMILY

from kenotron_models import SmallSizes, TransformersSpec, layers_on_meta
from kenotron_models.families import TransformersConfig

pytest.importorskip("transformers")
GROUPS = 10
SIZES: dict[str, Any] = {
    "layers": 4, "period": 4, "heads": 4, "head_dim": 16, "vocab_size": 96, "tp": 1,
    "sequence": 4096, "small_sequence": 32,
}  # fmt: skip
FILLED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), {"head_dim": 128}),
    "cohere_compass_text": {"rope_parameters": OF_FAMILY["cohere_compass_text"]["rope_parameters"]},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "lfm2_moe": {"layer_types": (["conv"] * 2 + ["full_attention"]) * 8,
                 "num_hidden_layers": 24},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256,
                       "indexer_budget": 2048, "indexer_compress_ratio": 4},
}  # fmt: skip
"""Keys that the defaults of a family leave out, without which no model is made."""
NOT_BUILT = {
    "blt": "no attribute 'hidden_size'",
    "dbrx": "no attribute 'rope_theta'",
    "deepseek_v4": "this buffer of torch.int64 is saved",
    "dots3_note": "is a per-layer attribute", "dots3_note_text": "is a per-layer attribute",
    "falcon_h1": "mup_vector: transformers does not compute this buffer again",
    "gemma3": "vision_tower.embeddings.position_ids: transformers does not compute",
    "gemma3n": "requires the timm library|timm",
    "gemma4_assistant": "hidden_size_per_layer_input must be 0",
    "gemma4_unified_assistant": "cannot be None",
    "moss_transcribe_diarize": "parameters, which are more than 100,000,000",
    "musicgen": "no attribute 'dropout'", "musicgen_melody": "no attribute 'dropout'",
    "phi4_multimodal": "parameters, which are more than 100,000,000",
    "phimoe": "its router draws experts at random",
    "qwen4_exp": "unsupported operand",
}  # fmt: skip
"""Families without a copy of their defaults, and why: models of no size can be built of most."""
WIDE = {"reformer": "cuts its positions in factors", "xmod": "needs a language"}
"""Families that are not narrow after, and why: only layers and token numbers are few."""


@cache
def kinds() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(kind: str, **changes: Any) -> TransformersConfig:
    """The defaults of a family, which drop nothing and see no later tokens."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind](**(FILLED.get(kind, {}) | changes))
    values = json.loads(config.to_json_string(use_diff=False))
    values |= {"is_decoder": True, "model_type": kind}

    def undropped(values: dict[str, Any]) -> dict[str, Any]:
        for key, value in values.items():
            if isinstance(value, dict):
                undropped(value)
            elif ("drop" in key or "jitter" in key) and type(value) in (int, float):
                values[key] = type(value)(0)
        return values

    return TransformersConfig(config_json=json.dumps(undropped(values)))


def signatures(spec: TransformersSpec) -> list[tuple[str, ...]]:
    """Names of each layer's parameters."""
    return [tuple(name for name, _ in each.named_parameters()) for _, each in layers_on_meta(spec)]


def count(spec: TransformersSpec) -> int:
    return sum(p.numel() for _, layer in layers_on_meta(spec) for p in layer.parameters())


def sizes_of(config: TransformersConfig, **changes: Any) -> SmallSizes:
    equal = config.kv_heads == config.num_attention_heads
    return SmallSizes(**SIZES | {"kv_heads": 4 if equal else 2} | changes)


def lists(config: TransformersConfig) -> dict[str, set[str]]:
    """Kinds of layers that a config lists."""
    keys = config.keys | config.keys.get("text_config", {})
    found = {key: value for key, value in keys.items() if re.search("layer_types|block_type", key)}
    return {key: {*value} for key, value in found.items() if isinstance(value, list)}


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.by_turns(5)
@pytest.mark.parametrize("group", range(GROUPS))
def test_a_family_has_a_narrow_copy_of_the_same_kinds_of_layers(group: int) -> None:
    for kind in kinds()[group::GROUPS]:
        if kind in NOT_BUILT:
            with pytest.raises(Exception, match=f"(?s){NOT_BUILT[kind]}"):
                small_of(kind)
            continue
        config = config_of(kind)
        small = small_of(kind)
        assert lists(small) == lists(config), kind
        assert small.vocab_size == 96 and (small.hidden_size <= 128) == (kind not in WIDE), kind
        fewer = small.num_hidden_layers <= min(12, config.num_hidden_layers)
        assert fewer == (kind != "dory"), kind  # its depth is made of three others
        if kind not in WIDE and not {"vision_config", "audio_config"} & config.keys.keys():
            assert count(small.decoder) < 20_000_000, kind


def small_of(kind: str) -> TransformersConfig:
    config = config_of(kind)
    return config.small(sizes_of(config))


WHOLE = (
    "afmoe", "bamba", "deepseek_v3", "gemma2", "gpt2", "gpt_neo", "gpt_oss", "jamba", "llama4_text",
    "minimax", "nemotron_h", "qwen3_next", "smollm3",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.by_turns(4)
@pytest.mark.parametrize("kind", WHOLE)
def test_each_layer_of_a_family_is_in_its_narrow_copy(kind: str) -> None:
    config = config_of(kind)
    small = config.small(sizes_of(config, layers=4))
    assert {*signatures(small.decoder)} == {*signatures(config.decoder)}
    assert count(small.decoder) < count(config.decoder) / 500
    assert small.num_hidden_layers % 4 == 0
