"""Every key of a model's config makes another model, is refused, or is said to have no effect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import hf_cases
import hf_keys
import pytest
import torch
from torch import Tensor

from kenotron_config import unread_model_keys
from kenotron_dist import Mesh
from kenotron_dist.placement import named_parameters, parameter_layouts
from kenotron_models import (
    FAMILIES,
    Build,
    Context,
    DecoderSpec,
    LayerStack,
    build_decoder,
    parameter_count,
)
from kenotron_models.families import LlaMoEConfig, TransformersConfig
from kenotron_models.hf import config_from_hf
from kenotron_models.layers import RopeScaling

LLAMOE = LlaMoEConfig(
    hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=99, max_position_embeddings=64, moe_num_experts=4,
    num_experts_per_tok=2,
)  # fmt: skip
READ = [config_from_hf(hf_cases.config_of(case).to_dict()) for case in hf_keys.BASES.values()]
YARN = RopeScaling(
    factor=4.0,
    rope_type="yarn",
    original_max_position_embeddings=400,
    beta_fast=50.0,
    beta_slow=12.0,
)
"""Some of the few waves of a small model stay, and some grow."""
OWN = {
    "DeepseekV3Config": {"rope_theta": 10.0, "rope_scaling": YARN},
    "GptOssConfig": {"rope_theta": 10.0, "rope_scaling": YARN, "swiglu_limit": 0.5},
    "OLMo3Config": {"rope_theta": 10.0, "rope_scaling": YARN},
    "Qwen3MoEConfig": {"mlp_only_layers": ()},
}
"""Values of small models with which other keys matter."""
BASES = [
    replace(config, **OWN.get(name, {}))
    for name, config in {type(config).__name__: config for config in [*READ, LLAMOE]}.items()
]
"""A small model of each family."""
IN_TRAINING = {
    "attention_dropout", "attn_pdrop", "dt_init", "dt_init_floor", "dt_max", "dt_min", "dt_scale",
    "embd_pdrop", "expert_capacity_factor", "resid_pdrop", "residual_in_fp32",
    "router_aux_loss_coef", "router_aux_loss_type", "router_bias_rate", "router_jitter_noise",
    "router_z_loss_coef", "time_step_floor", "time_step_max", "time_step_min", "z_loss_enabled",
}  # fmt: skip
"""Keys of first values, of what is added to the loss, and of what training alone does: what they
change is seen by the app's walk, as is that of every other key of a config."""
WALK = Path(__file__).parents[1] / "apps/train/tests/model_key_changes.py"
KERNELS = {"attn_implementation", "token_dispatcher_type"}
"""Ways to compute the same numbers."""
OF_OTHERS = {"bos_token_id", "eos_token_id", "max_position_embeddings"}
"""Keys that data, generation and exports read."""


def changes(owner: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of a config, with some other values."""
    hints = get_type_hints(type(owner))
    for each in fields(owner):
        value, name = getattr(owner, each.name), (*path, each.name)
        if is_dataclass(value):
            yield from changes(value, name)
            continue
        for other in others(each.name, hints[each.name], value):
            if other != value:
                yield name, other


def others(name: str, hint: Any, value: Any) -> list[Any]:
    """Other values of a key's type."""
    kinds = get_args(hint) or (hint,)
    literal = hint if get_origin(hint) is Literal else None
    literal = literal or next((kind for kind in kinds if get_origin(kind) is Literal), None)
    if literal is not None:
        return [*get_args(literal)]
    if RopeScaling in kinds:
        return [RopeScaling(factor=2.0, original_max_position_embeddings=16)]
    if value is None:
        known = {int: [3], float: [0.5], bool: [True], str: ["dense"]}
        return [each for kind in kinds for each in known.get(kind, ())]
    if value == ():
        return [(0,)]
    found = hf_keys.others(name, value)
    if isinstance(value, tuple):
        found.append(value[:1])
    return [tuple(each) if isinstance(each, list) else each for each in found]


def with_value(owner: Any, path: tuple[str, ...], value: Any) -> Any:
    """A config with another value of a key."""
    name, *rest = path
    inner = with_value(getattr(owner, name), tuple(rest), value) if rest else value
    return replace(owner, **{name: inner})


def seen(spec: DecoderSpec) -> tuple[dict[str, tuple[int, ...]], int, Tensor]:
    """Shapes and number of the parameters, and logits of two documents with ordinary weights."""
    stack = LayerStack(build_decoder(spec, Build(Mesh.connect()["tp"]))).to_empty(device="cpu")
    layouts = parameter_layouts(stack, {"tp": 1, "ep": 1})
    shapes = {name: tuple(each.shape) for name, each in layouts.items()}
    with torch.no_grad():
        for number, (name, parameter) in enumerate(named_parameters(stack).items()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.copy_(hf_cases.ordinary(name, drawn))
        positions = torch.cat([torch.arange(28), torch.arange(12)])[None]
        logits = stack.eval()(torch.arange(40) * 7 % spec.vocab_size, Context(positions))
    return shapes, parameter_count(spec), logits


@pytest.mark.by_turns(8)
@pytest.mark.parametrize("base", BASES, ids=lambda base: type(base).__name__)
def test_a_changed_key_makes_another_model_or_is_named(base: Any) -> None:
    shapes, count, logits = seen(base.decoder)
    assert torch.isfinite(logits).all()
    accepted: dict[tuple[str, ...], bool] = {}
    for path, value in changes(base):
        if accepted.get(path) or path[-1] in KERNELS:
            continue
        try:
            new = with_value(base, path, value)
        except ValueError:
            continue
        if new.decoder == base.decoder:
            accepted[path] = is_named(new, path) or is_default(new, path)
            continue
        accepted[path] = path[-1] in IN_TRAINING | OF_OTHERS
        if not accepted[path]:
            now = seen(new.decoder)
            accepted[path] = now[:2] != (shapes, count) or not torch.equal(now[2], logits)
    assert len(accepted) > 10
    assert [path for path, is_seen in accepted.items() if not is_seen] == []


def is_named(config: Any, path: tuple[str, ...]) -> bool:
    name = f"model.model_config.{'.'.join(path)}"
    return any(line.startswith((f"{name}: ", f"{name}.")) for line in unread_model_keys(config))


def test_the_folder_of_a_model_of_transformers_has_an_effect(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))
    assert unread_model_keys(TransformersConfig(path=str(tmp_path))) == []


def is_default(owner: Any, path: tuple[str, ...]) -> bool:
    """Whether a key asks for nothing: it is required, or has its default."""
    *parents, last = path
    for name in parents:
        owner = getattr(owner, name)
    default = next(each.default for each in fields(owner) if each.name == last)
    return default is MISSING or getattr(owner, last) == default


def test_every_family_has_a_base() -> None:
    own = {family.config for family in FAMILIES}
    left = {family.__name__ for family in own - {type(base) for base in BASES}}
    assert left == {"TransformersConfig"}, "its keys are those of transformers"


@pytest.mark.parametrize("key", sorted(IN_TRAINING))
def test_keys_of_training_are_in_the_walk_of_the_app(key: str) -> None:
    assert re.search(rf'"(\w+\.)?{key}": \(', WALK.read_text())
