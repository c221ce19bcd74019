"""`model.init_method` with `use_mup`: what it makes of a model, and what it says when it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from kenotron_config import Config, ConfigError, cautions, dump_config, parse_config, unavailable

YAML = Path(__file__).with_name("tiny_llama.yaml").read_text(encoding="utf-8")
BASE = (
    "base: {hidden_size: 8, intermediate_size: 32, num_attention_heads: 2, num_key_value_heads: 2}"
)


def parse(method: str, *changes: str) -> Config:
    return parse_config(YAML, "c.yaml", [f"model.init_method={{use_mup: true{method}}}", *changes])


def test_widths_set_multipliers_draws_and_rates() -> None:
    config = parse(f", {BASE}, std: 0.1, embedding_multiplier: 3, output_multiplier: 4")
    assert unavailable(config) == [] and config.draws == (0.1, "NUM_LAYERS")
    assert config.decoder.embedding_scale == 3.0
    assert config.decoder.logit_scale == 2.0
    assert config.scales is not None
    inner = config.scales["layers.0.attention.qkv.weight"]
    assert (inner.lr, inner.weight_decay) == (0.5, 2.0)
    assert inner.std == pytest.approx((0.1 / 2**0.5,) * 3)
    assert parse_config(dump_config(config), "again") == config


def test_the_rule_of_nanotron_has_no_base() -> None:
    config = parse(", rule: nanotron")
    assert config.scales is not None
    assert config.scales["layers.0.mlp.gate_up.weight"].lr == 8.0
    assert config.scales["embedding.weight"].std == (1.0,)
    assert {block.mixer.factor for block in config.decoder.blocks} == {0.25}  # 1/K
    assert not any("use_mup" in line for line in cautions(config))


def test_a_file_of_nanotron_has_its_rule_and_a_caution() -> None:
    config, named = parse(""), parse(", rule: nanotron")
    assert config.scales == named.scales and config.multipliers == named.multipliers
    (line,) = (line for line in cautions(config) if "use_mup" in line)
    assert "true was given without base: the table of Nanotron's own runs is taken (rule: " in line
    assert parse_config(dump_config(config), "again") == config


def test_attention_and_depth_follow_their_rules() -> None:
    wide = "base: {hidden_size: 8, intermediate_size: 32, num_hidden_layers: 1}"
    config = parse(f", {wide}, depth_rule: inverse")
    assert [block.residual_scale for block in config.decoder.blocks] == [0.5, 0.5]
    assert config.decoder.blocks[0].mixer.factor == pytest.approx(2**0.5 / 4)  # K 2 and 4
    usual = parse(f", {wide}, attention_scale: inverse_sqrt")
    assert usual.decoder.blocks[0].mixer.factor == 0.5
    assert usual.decoder.blocks[0].residual_scale == 1.0


def test_without_use_mup_nothing_is_multiplied() -> None:
    config = parse_config(YAML, "c.yaml", [])
    assert config.scales is None and not config.multipliers.change
    assert config.decoder == config.model.model_config.decoder


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        (", std: 0.1", (), "base: nothing was given; µP needs the widths of a base model: add"),
        (", rule: spectral", (), "or set rule to nanotron for Nanotron's own table"),
        (", base: {num_hidden_layers: 1}", (), "was given; µP needs the widths of a base model"),
        (", base: {hidden_size: 0}", (), "base: hidden_size: 0 was given; it must be at least 1"),
        (", base: {width: 8}", (), "model.init_method.base: width was given; it must have keys of"),
        (", base: {vocab_size: 8}", (), "vocab_size was given; it must have keys of model.model_c"),
        (", base: {rms_norm_eps: 8}", (), "model_config that are widths, such as hidden_size"),
        (", base: {hidden_size: 9}", (), "model.init_method.base: hidden_size: 9 was given; it"),
        (f", {BASE}, std: 0", (), "std: 0.0 was given; it must be finite and above 0"),
        (f", {BASE}, output_multiplier: -1", (), "output_multiplier: -1.0 was given; it must be"),
        (f", {BASE}, depth_rule: inverse", (), "add num_hidden_layers to base, or set it to none"),
        (", rule: nanotron, std: 0.1", (), "std: 0.1 was given; rule nanotron has none: leave it"),
        (f", rule: nanotron, {BASE}", (), "was given; rule nanotron has none: leave it out, or"),
        (
            f", {BASE}",
            ("optimizer.optimizer_factory={name: muon, per_head: true}",),
            "per_head: true was given; with model.init_method.use_mup matrices must be whole",
        ),
        (
            ", base: {hidden_size: 8, num_attention_heads: 2, num_key_value_heads: 1}",
            ("optimizer.optimizer_factory={name: sgd}", "model.model_config.num_key_value_heads=1"),
            "model.init_method.base: the matrices in layers.0.attention.qkv.weight of 16, 4, 4 row",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_parametrised_names_key_and_fix(
    method: str, changes: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(method, *changes)
    (problem,) = caught.value.problems
    assert sentence in problem


def test_false_is_no_parametrisation() -> None:
    with pytest.raises(ConfigError, match="use_mup: false was given; give std instead for normal"):
        parse_config(YAML, "c.yaml", ["model.init_method={use_mup: false}"])
