"""`model.mtp`: a module that predicts the token after the next, and what it is refused with."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from kenotron_config import Config, ConfigError, dump_config, parse_config
from kenotron_config.doremi_section import DoReMiConfig
from kenotron_config.mtp_checks import mtp_problems
from kenotron_models.families import MoEConfig, Qwen2Config

YAML = Path(__file__).with_name("tiny_llama.yaml").read_text(encoding="utf-8")


def parse(mtp: str, *changes: str) -> Config:
    return parse_config(YAML, "c.yaml", [f"model.mtp={mtp}", *changes])


def test_the_decoder_has_the_weight() -> None:
    config = parse("{weight: 0.1}")
    assert config.decoder.mtp_weight == 0.1 and parse("{}").decoder.mtp_weight == 0.3
    assert config.model.model_config.decoder.mtp_weight == 0.0 == parse("null").decoder.mtp_weight
    assert parse_config(dump_config(config), "again") == config


@pytest.mark.parametrize(
    ("mtp", "changes", "sentence"),
    [
        ("{layers: 2}", (), "model.mtp.layers: 2 was given; it must be 1, a module that predicts"),
        ("{weight: -0.1}", (), "model.mtp.weight: -0.1 was given; it must be finite and above 0"),
        ("{weight: .inf}", (), "model.mtp.weight: inf was given; it must be finite and above 0"),
        (
            "{}",
            ("model.init_method={use_mup: true, rule: nanotron}",),
            "has no scales for its tensors: give std instead of use_mup, or leave mtp out",
        ),
        (
            "{}",
            ("model.init_method={path: runs/1}",),
            "has no weights for it: give std instead of path, or leave mtp out",
        ),
        (
            "{}",
            ("model.cuda_graph=true",),
            "a CUDA graph does not hold it: set cuda_graph to false",
        ),
    ],
)
def test_what_cannot_be_is_refused(mtp: str, changes: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(mtp, *changes)
    (problem,) = caught.value.problems
    assert sentence in problem


def test_a_balance_of_all_layers_is_refused() -> None:
    model = parse("{}").model
    given = {each.name: getattr(model.model_config, each.name) for each in fields(Qwen2Config)
             if hasattr(model.model_config, each.name)}  # fmt: skip
    experts = MoEConfig(
        num_experts=4, top_k=2, moe_intermediate_size=8, router_aux_loss_coef=0.1,
        router_aux_loss_type="all_layers",
    )  # fmt: skip
    sizes = Qwen2Config(**given | {"moe_config": experts})
    (problem,) = mtp_problems(replace(model, model_config=sizes))
    assert "router_aux_loss_type all_layers does not count its experts: choose" in problem


def test_a_proxy_of_doremi_is_refused() -> None:
    doremi = DoReMiConfig(domain_names=("a", "b"), ref_model_resume_checkpoint_path="runs/1")
    (problem,) = mtp_problems(parse("{}").model, doremi)
    assert "a proxy of doremi weighs the losses of next tokens alone: leave mtp out" in problem
