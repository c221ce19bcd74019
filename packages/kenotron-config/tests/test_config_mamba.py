"""Kénotron's configs of a Mamba: its keys, its first values, and what is wrong with them."""

from __future__ import annotations

import pytest
from test_config_nanotron import parse

from kenotron_config import Config, ConfigError, ignored_keys, unavailable
from kenotron_models import parameter_count
from kenotron_models.families import MambaModelConfig
from kenotron_models.layers import MambaSpec

SIZES = {
    "is_mamba_config": True, "d_model": 1536, "num_hidden_layers": 48, "vocab_size": 50277,
    "dtype": "float32", "fused_add_norm": True, "pad_token_id": None, "rms_norm": True,
    "pad_vocab_size_multiple": 8, "residual_in_fp32": True, "rms_norm_eps": 1e-5, "ssm_cfg": None,
}  # fmt: skip
INIT = {
    "initializer_range": 0.02, "rescale_prenorm_residual": True, "n_residuals_per_layer": 1,
}  # fmt: skip


def example(**changes: object) -> Config:
    return parse(
        {
            "model.model_config": SIZES, "model.init_method": INIT, "model.dtype": "bfloat16",
            "model.make_vocab_size_divisible_by": 1, "parallelism.dp": 2, "parallelism.pp": 2,
            "parallelism.tp": 2, **changes,
        }
    )  # fmt: skip


def test_the_example_can_be_run_and_counts_its_parameters() -> None:
    config = example()
    sizes = config.model.model_config
    assert isinstance(sizes, MambaModelConfig) and unavailable(config) == []
    assert parameter_count(sizes) == 793_199_616
    padded = parse({"model.model_config": SIZES | {"vocab_size": 50278}})
    assert parameter_count(padded.decoder) == 793_201_152
    assert config.draws == (0.02, "FAN_IN", 1) and config.decoder.residual_in_fp32
    assert not [line for line in ignored_keys(config) if "model_config" in line]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_given_section_says_the_same(tp: int) -> None:
    ssm = {"d_state": 16, "d_conv": 4, "expand": 2, "dt_rank": "auto", "use_fast_path": True}
    config = example(**{"model.model_config": SIZES | {"ssm_cfg": ssm}, "parallelism.tp": tp})
    assert config.decoder == example().decoder
    mixer = config.decoder.blocks[0].mixer
    assert isinstance(mixer, MambaSpec) and (mixer.channels, mixer.step_rank) == (3072, 96)


def test_keys_without_effect_are_named() -> None:
    changed = {"dtype": "bfloat16", "pad_vocab_size_multiple": 16, "fused_add_norm": False}
    config = example(**{"model.model_config": SIZES | changed})
    lines = [line.split(":")[0] for line in ignored_keys(config)]
    assert {f"model.model_config.{name}" for name in changed} <= set(lines)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("parallelism.tp", 5, r"tp: 5 was given; it must divide model.model_config.d_model \* ssm"),
        ("model.model_config.d_model", 0, "d_model: 0 was given; it must be at least 1"),
        ("model.model_config.rms_norm_eps", 0.0, "rms_norm_eps: 0.0 was given; it must be a finit"),
        ("model.model_config.ssm_cfg", {"d_conv": 0}, "ssm_cfg.d_conv: 0 was given; it must be at"),
        (
            "model.model_config.ssm_cfg",
            {"dt_min": 0.2},
            "ssm_cfg.dt_min: 0.2 was given; it must be above 0 and at most dt_max",
        ),
        (
            "model.model_config.ssm_cfg",
            {"dt_scale": 0.0},
            "ssm_cfg.dt_scale: 0.0 was given; it must be a finite number above 0",
        ),
        ("model.model_config.ssm_cfg", {"dt_init": "even"}, "dt_init"),
        ("model.init_method.initializer_range", -1.0, "initializer_range: -1.0 was given; it must"),
        ("model.init_method.n_residuals_per_layer", 0, "n_residuals_per_layer: 0 was given; it mu"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: object, message: str) -> None:
    changes = {path: value}
    if path.startswith("model.model_config."):
        changes = {"model.model_config": SIZES | {path.split(".")[-1]: value}}
    elif path.startswith("model.init_method."):
        changes = {"model.init_method": INIT | {path.split(".")[-1]: value}}
    with pytest.raises(ValueError, match=message):
        example(**changes)


HYBRID = {
    "is_nemotron_h_config": True, "hidden_size": 32, "vocab_size": 300, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "mamba_num_heads": 4,
    "mamba_head_dim": 8, "n_groups": 2, "layers": "M*|-M",
}  # fmt: skip


@pytest.mark.parametrize(("pp", "engine"), [(1, "1f1b"), (2, "1f1b"), (1, "interleaved")])
def test_parts_of_a_text_are_stages_or_there_is_one_stage(pp: int, engine: str) -> None:
    keys = {"parallelism.pp": pp, "parallelism.pp_engine": engine}
    assert parse({"model.model_config": HYBRID, **keys}).decoder.stage_starts == (2,)


@pytest.mark.parametrize(
    ("pp", "engine", "stages"), [(4, "1f1b", "4 stages"), (2, "interleaved", "4 stages")]
)
def test_another_number_of_stages_is_named(pp: int, engine: str, stages: str) -> None:
    said = rf"model.model_config.layers: 'M\*\|-M' was given, 2 parts .*; the pipeline has {stages}"
    keys = {"parallelism.pp": pp, "parallelism.pp_engine": engine}
    with pytest.raises(ConfigError, match=said):
        parse({"model.model_config": HYBRID, **keys})
