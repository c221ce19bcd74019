"""Hugging Face's config.json and tensor names: what can be said here, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from kenotron_models.families import (
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)
from kenotron_models.families.mamba import SSMConfig
from kenotron_models.hf import (
    config_from_hf,
    config_to_hf,
    differences,
    hf_dtype,
    hf_tensors,
    is_superfluous,
    read_hf_config,
    with_its_head,
)
from kenotron_models.layers import RopeScaling

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 99,
    "max_position_embeddings": 64,
}
OURS = dict(SIZES, num_key_value_heads=2)
GIVEN = {**OURS, "model_type": "llama"}
YARN = {"rope_type": "yarn", "factor": 4.0}


def said(**keys):
    return config_from_hf({**GIVEN, **keys})


CONFIGS = [
    LlamaConfig(**OURS),
    LlamaConfig(**OURS, head_dim=16, tie_word_embeddings=True, bos_token_id=None),
    LlamaConfig(**OURS, rope_scaling=RopeScaling(factor=8.0), rope_theta=5e5),
    LlamaConfig(**OURS, rope_scaling=RopeScaling(factor=2.0, rope_type="linear")),
    LlamaConfig(
        **OURS, rope_scaling=RopeScaling(factor=2.0, rope_type="yarn", attention_factor=1.5)
    ),
    LlamaConfig(**OURS, rope_interleaved=True),
    Phi3Config(**OURS, rope_interleaved=True),
    MistralConfig(**OURS, sliding_window_size=7),
    MistralConfig(**OURS, sliding_window_size=None),
    Qwen2Config(**OURS, attention_bias=True),
    Qwen2Config(**OURS, attention_bias=True, sliding_window_size=5, full_attention_layers=(0, 1)),
    Qwen2Config(**OURS, attention_bias=True, sliding_window_size=5, full_attention_layers=(1,)),
    Qwen3Config(**OURS, sliding_window_size=9, full_attention_layers=(0,)),
    Starcoder2Config(**SIZES, grouped_query=True, num_kv_heads=2, sliding_window_size=9),
    Starcoder2Config(**SIZES, multi_query=True, tie_word_embeddings=False, embd_pdrop=0.0),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_written_is_read_as_the_same_model(config):
    values = json.loads(json.dumps(config_to_hf(config)))
    read = config_from_hf(values)
    assert type(read) is type(config)
    assert differences(read.decoder, config.decoder) == []


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LlamaConfig(**OURS, attention_bias=True), "qwen2"),
        (Qwen2Config(**OURS), "llama"),
        (Qwen2Config(**OURS, sliding_window_size=5), "mistral"),
        (Qwen2Config(**OURS, full_attention_layers=(0,)), "llama"),
        (Qwen2Config(**OURS, no_rope_layer=2), "smollm3"),
    ],
)
def test_another_architecture_is_taken_where_it_says_the_same(config, kind):
    assert config_to_hf(config)["model_type"] == kind


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (
            Qwen2Config(**OURS, no_rope_layer=2, attention_bias=True),
            "layers.1.attention.rope: null and {theta: 10000.0, interleaved: False, share: 1.0}",
        ),
        (
            Starcoder2Config(**SIZES, use_position_embeddings=True, use_rotary_embeddings=False),
            "learned_positions: True and False",
        ),
        (Starcoder2Config(**SIZES, scale_attn_weights=False), "attention.scale: 1.0 and null"),
        (
            Starcoder2Config(**SIZES, sliding_window_size=3, global_attn_layers=(1,)),
            "layers.1.attention.window: null and 3",
        ),
    ],
)
def test_a_model_that_no_architecture_says_is_refused_by_its_field(config, field):
    with pytest.raises(ValueError, match=f"(?s)cannot say this model.*\n.*{field}"):
        config_to_hf(config)


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({"rope_theta": 5e5}, "attention.rope.theta", 5e5),
        (
            {"rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}},
            "attention.rope.theta",
            3e4,
        ),
        ({"num_key_value_heads": None}, "attention.kv_heads", 4),
        ({"eos_token_id": [7, 8]}, "eos_token_id", 7),
        ({"eos_token_id": None}, "eos_token_id", None),
        ({"head_dim": 24}, "attention.head_dim", 24),
        ({"attention_bias": None, "rope_scaling": None}, "attention.qkv_bias", False),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "attention.rope.scaling",
            RopeScaling(factor=2, rope_type="linear"),
        ),
        (
            {"rope_scaling": YARN},
            "attention.rope.scaling",
            RopeScaling(factor=4.0, rope_type="yarn", original_max_position_embeddings=64),
        ),
        (
            {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            "attention.rope.scaling",
            RopeScaling(
                factor=4.0,
                rope_type="yarn",
                original_max_position_embeddings=64,
                attention_factor=1.0,
            ),
        ),
        (
            {"rope_scaling": {**YARN, "truncate": False}},
            "attention.rope.scaling",
            RopeScaling(
                factor=4.0,
                rope_type="yarn",
                original_max_position_embeddings=64,
                truncate=False,
            ),
        ),
        (  # what transformers reads
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "attention.rope.scaling",
            RopeScaling(factor=4.0, rope_type="yarn", original_max_position_embeddings=64),
        ),
        ({"attention_bias": True}, "attention.out_bias", True),
        ({"mlp_bias": True}, "mlp.bias", True),
        (
            {"mlp_bias": True, "rope_scaling": YARN},
            "attention.rope.scaling",
            RopeScaling(factor=4.0, rope_type="yarn", original_max_position_embeddings=64),
        ),
        ({"model_type": "mistral"}, "attention.window", 4096),
        ({"model_type": "mistral", "sliding_window": None}, "attention.window", None),
        (
            {"model_type": "qwen2", "sliding_window": 3, "use_sliding_window": False},
            "attention.window",
            None,
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 3,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            "windows",
            (None, None, None, 3),
        ),
        ({"model_type": "qwen3"}, "attention.head_dim", 128),
        ({"model_type": "starcoder2"}, "tie_word_embeddings", True),
    ],
)
def test_keys_old_and_new_mean_what_they_do_there(keys, field, value):
    found: Any = said(**keys).decoder
    if field == "windows":
        found = tuple(block.mixer.window for block in found.blocks)
    elif field == "mlp.bias":
        found = found.blocks[0].feed_forward.bias
    elif field.startswith("attention."):
        for name in ["mixer", *field.split(".")[1:]]:
            found = getattr(found.blocks[0] if name == "mixer" else found, name)
    else:
        found = getattr(found, field)
    assert found == value


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"model_type": "gpt2"}, "model_type: 'gpt2' was given; it must be one of llama"),
        ({"hidden_size": None}, "hidden_size: None was given; it must be a whole number"),
        ({"rms_norm_eps": None}, "rms_norm_eps: null was given; it must be a finite number"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps: 'x' was given; it must be a finite number, or be"),
        (
            {"model_type": "granitemoehybrid", "logits_scaling": None},
            "logits_scaling: null was given; it must be a finite number, or be left out",
        ),
        (
            {"model_type": "qwen3_moe", "norm_topk_prob": None},
            "norm_topk_prob: null was given; it must be true or false, or be left out",
        ),
        (
            {"num_hidden_layers": 10**7},
            "num_hidden_layers: 10000000 layers were given; a model may have 10000",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M" * 10**7},
            "hybrid_override_pattern: 10000000 layers were given",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 10**7},
            "num_experts: 10000000 were given; all layers together may have 1000000 experts",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' was given; a llama must have 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantised weights"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.rope_type: 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: nothing"),
        ({"rope_scaling": {**YARN, "short_factor": [1]}}, "rope_scaling.short_factor"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: .* one mapping"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 4},
            "layer_types: sliding_attention was given, but use_sliding_window",
        ),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 4}, "layer_types: "),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "4 times"),
        ({"model_type": "starcoder2", "use_bias": False}, "use_bias: False"),
        ({"model_type": "starcoder2", "partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"model_type": "starcoder2", "num_key_value_heads": -1}, "num_key_value_heads: -1"),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_key(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        said(**keys)


def test_all_rows_of_ours_come_from_one_place_and_go_back():
    for config in CONFIGS:
        for name, whole in hf_tensors(config).items():
            rows = torch.zeros(whole.shape[0])
            theirs = {}
            for source, row, (first, *_), count in whole.runs():
                rows[first : first + count] += 1
                values = theirs.setdefault(source, torch.full(whole.sources()[source][:1], -1.0))
                values[row : row + count] = torch.arange(first, first + count).float()
            assert (rows == 1).all(), name
            ours = torch.arange(whole.shape[0]).float()
            for part in whole.parts:
                column = replace(part, shape=part.shape[:1], start=part.start[:1])
                assert torch.equal(column.of(ours), theirs[part.name]), name


@pytest.mark.parametrize("family", ["llama", "starcoder2"])
def test_a_head_that_is_not_the_embedding_unties_a_model(family):
    keys = {"tie_word_embeddings": True} if family == "llama" else {}  # the other one's default
    config = said(model_type=family, **keys)
    assert config.decoder.tie_word_embeddings
    for same, tied in ((False, False), (True, True), (None, True)):
        answers = {("model.embed_tokens.weight", "lm_head.weight"): same}
        found = with_its_head(config, lambda *both, answers=answers: answers[both])
        assert found.decoder.tie_word_embeddings is tied


def test_old_buffers_and_the_head_of_tied_models_may_lie_in_a_file():
    untied, tied = (LlamaConfig(**OURS, tie_word_embeddings=each) for each in (0, 1))
    assert is_superfluous("model.layers.3.self_attn.rotary_emb.inv_freq", untied)
    assert is_superfluous("lm_head.weight", tied)
    assert not is_superfluous("lm_head.weight", untied)
    assert not is_superfluous("model.layers.3.self_attn.q_proj.bias", tied)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "it has no config.json"),
        ("{", "config.json is not JSON"),
        ("[" * 10**5, "config.json is not read: its JSON is nested too deeply"),
        ("[]", "config.json: a list was found"),
        ('{"model_type": "bert"}', "config.json: model_type: 'bert'"),
    ],
)
def test_errors_of_a_folder_name_the_file(text, sentence, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_hf_config(tmp_path)
    with pytest.raises(ValueError, match="Hugging Face: there is no such folder"):
        read_hf_config(tmp_path / "none")


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, None),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "bf16"}, "bfloat16"),
        ({"torch_dtype": "auto"}, None),
        ({"dtype": {"": "float16", "lm_head": "float32"}}, "float16"),
        ({"dtype": {"lm_head": "float32"}}, None),
    ],
)
def test_the_dtype_of_a_config_is_read_in_all_spellings(keys, dtype):
    assert hf_dtype(keys) == dtype


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"dtype": "int8"}, "dtype: 'int8' was given; it must be one of bfloat16, float16, float"),
        ({"torch_dtype": 16}, "torch_dtype: 16 was given; it must be one of"),
        ({"dtype": {"": "float8"}}, "dtype: {'': 'float8'} was given"),
    ],
)
def test_a_dtype_that_weights_cannot_have_is_refused(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        hf_dtype(keys)


def test_a_mamba_may_have_other_channels_than_expand_says():
    keys = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 9}
    config = config_from_hf({"model_type": "mamba", **keys, "intermediate_size": 48})
    assert config.decoder.blocks[0].mixer.channels == 48
    values = config_to_hf(config)
    assert (values["expand"], values["intermediate_size"]) == (1, 48)
    assert config_from_hf(values).decoder == config.decoder
    usual = config_from_hf({"model_type": "mamba", **keys, "intermediate_size": 64})
    assert usual.ssm_cfg.channels is None and usual.channels == 64
    with pytest.raises(ValueError, match="intermediate_size: 'x' was given; it must be a whole"):
        config_from_hf({"model_type": "mamba", **keys, "intermediate_size": "x"})
    with pytest.raises(ValueError, match="channels: 0 was given; it must be at least 1"):
        SSMConfig(channels=0)
