"""Every key of every family: it has an effect, a rule that names it, a way to Hugging Face."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest

from kenotron_models import FAMILIES, SmallSizes, config_from_json
from kenotron_models.families import (
    DeepseekV3Config,
    Gemma3Config,
    GraniteHybridConfig,
    JambaConfig,
    LlaMoEConfig,
    MambaModelConfig,
    MistralConfig,
    MoEConfig,
    NemotronHConfig,
    Qwen2Config,
    Qwen3MoEConfig,
    Qwen3NextConfig,
    SmolLM3Config,
    Starcoder2Config,
)
from kenotron_models.families.keys import OF_CONFIG, Key, KeyTable, key_table
from kenotron_models.families.mamba import SSMConfig
from kenotron_models.hf import config_from_hf, config_to_hf
from kenotron_models.layers import RopeScaling

BASES: dict[type[Any], dict[str, Any]] = {
    Qwen2Config: {"attention_bias": True},
    Gemma3Config: {"sliding_window_pattern": 2},
    LlaMoEConfig: {"moe_num_experts": 4},
    Qwen3MoEConfig: {"mlp_only_layers": (0,)},
    Qwen3NextConfig: {"mlp_only_layers": (0,)},
    SmolLM3Config: {"use_sliding_window": True, "sliding_window": 64},
    Starcoder2Config: {"sliding_window_size": 64, "grouped_query": True, "num_kv_heads": 4},
    GraniteHybridConfig: {"layers": "M*MM", "position_embedding_type": "rope"},
    JambaConfig: {"attn_layer_period": 2, "attn_layer_offset": 0},
}
"""Keys of models in which all others have an effect."""
NEEDED: dict[str, dict[str, Any]] = {
    "z_loss_coefficient": {"z_loss_enabled": True},
    "use_rotary_embeddings": {"use_position_embeddings": True},
    "use_position_embeddings": {"use_rotary_embeddings": False},
    "rope_seq_len_interpolation_factor": {"rope_scaling": None},
    "multi_query": {"grouped_query": False},
    "layer_types": {"layers": None},
    "num_hidden_layers": {"layers": None},
    "topk_group": {"n_group": 4},
    "full_attention_layers": {"sliding_window_size": 64},
    "ring_attn_heads_k_stride": {"attn_implementation": "llama3_ring_attention"},
    "shared_expert_intermediate_size": {"enable_shared_expert": True},
}
"""Keys that matter next to another value of these, where a config has them."""
TOGETHER = ("use_rotary_embeddings", "use_position_embeddings", "ring_attn_heads_k_stride")
"""Keys that cannot be changed without those."""
OTHER: dict[str, list[Any]] = {
    "attn_implementation": ["plain", "blocked"],
    "layers": ["MMMM", "LLLL", "M|*", (0, 2)],
    "layer_types": [
        ("full_attention",) * 4, ("full_attention", *["linear_attention"] * 3),
    ],
    "full_attention_layers": [(0,)],
    "global_attn_layers": [(0,)],
    "mlp_only_layers": [(1,)],
    "no_rope_layers": [(1,) * 4],
    "moe_config": [MoEConfig(num_experts=4)],
    "ssm_cfg": [SSMConfig(d_state=4)],
    "time_step_limit": [(0.01, 0.2)],
    "dt_rank": [7],
    "rope_scaling": [RopeScaling(factor=3.0)],
    "activation_function": ["relu"],
}  # fmt: skip
"""Values of keys that are no numbers."""
ELSEWHERE = {
    "multi_query": "grouped_query decides; both together are refused",
    "ring_attn_heads_k_stride": "parallelism reads it; the decoder is the same on any layout",
}
"""Keys that no decoder and no config.json shows, and where they are read."""
SIZES = SmallSizes(
    layers=4, period=2, heads=4, kv_heads=2, head_dim=8, vocab_size=96, tp=2, sequence=64,
    small_sequence=32, ep=2,
)  # fmt: skip
SECTIONS = {"moe_config": MoEConfig(enable_shared_expert=True), "ssm_cfg": SSMConfig()}
NOT_BACK = {
    (NemotronHConfig, "time_step_min"),
    (NemotronHConfig, "time_step_limit"),
    (GraniteHybridConfig, "num_hidden_layers"),
}
"""Keys that one key of config.json says together, or that need another one."""
KINDS = [family.config for family in FAMILIES if issubclass(family.config, KeyTable)]


every_family = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@functools.cache
def base(kind: type[Any]) -> Any:
    """A model of a family with few layers."""
    few = {} if kind is NemotronHConfig else {"num_hidden_layers": 4}
    return kind(**few, **BASES.get(kind, {}))


def keys_of(kind: type[Any]) -> Iterator[tuple[str, str, Key]]:
    """A section of a model or none, a key of it, and its entry in the table."""
    sections = {Qwen2Config: "moe_config", MambaModelConfig: "ssm_cfg"}
    for section in ("", *([sections[kind]] if kind in sections else [])):
        for name, each in key_table(type(owner_of(kind, section))).items():
            yield section, name, each


def owner_of(kind: type[Any], section: str) -> Any:
    return SECTIONS[section] if section else base(kind)


def with_owner(kind: type[Any], section: str, owner: Any) -> Any:
    return replace(base(kind), **{section: owner}) if section else owner


def others(owner: Any, name: str) -> list[Any]:
    """Other values of a key."""
    value, hint = getattr(owner, name), get_type_hints(type(owner))[name]
    if name in OTHER:
        return OTHER[name]
    literals = [each for kind in (hint, *get_args(hint)) for each in get_args(kind)]
    if words := [each for each in literals if isinstance(each, str)]:
        return [each for each in words if each != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        found = [value * 2, value + 1, value / 2, value * 0.9 + 0.05]
        return [*map(type(value), found)]
    return [2, 8, 0.5, "other"] if value is None else [f"{value}-other"]


@functools.cache
def accepted(kind: type[Any], section: str, name: str) -> list[tuple[Any, Any]]:
    """At most two pairs of models that differ in the key."""
    owner = owner_of(kind, section)
    needed = {k: v for k, v in NEEDED.get(name, {}).items() if k in key_table(type(owner))}
    together = name in TOGETHER
    found = []
    for value in others(owner, name):
        try:
            after = with_owner(kind, section, replace(owner, **needed, **{name: value}))
            before = owner if together else replace(owner, **needed)
            before = with_owner(kind, section, before)
            assert after.decoder and before.decoder
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if after != before:
            found.append((before, after))
    return found[:2]


def says_no_effect(kind: type[Any], name: str) -> bool:
    """Return True where the text below a key says so."""
    sources = (inspect.getsource(each) for each in kind.__mro__ if each is not object)
    said = re.compile(rf'^    {name}:(?:(?!""").)*"""No effect', re.MULTILINE | re.DOTALL)
    return any(said.search(source) for source in sources)


@functools.cache
def written(config: Any) -> str:
    """The keys of its config.json; nothing where Hugging Face has no such model."""
    try:
        return json.dumps(config_to_hf(config), sort_keys=True)
    except ValueError:
        return ""


@every_family
def test_a_key_has_an_effect_or_is_said_to_have_none(kind: type[Any]) -> None:
    wrong = []
    for section, name, each in keys_of(kind):
        pairs = accepted(kind, section, name)
        if not pairs:  # one value alone is known: others are refused by the key's name
            wrong += [] if each.rule is not None else [f"{name}: no other value"]
            continue
        seen = any(a.decoder != b.decoder or written(a) != written(b) for a, b in pairs)
        without = says_no_effect(type(owner_of(kind, section)), name) or name in ELSEWHERE
        without |= kind is LlaMoEConfig and each.at == (OF_CONFIG,)  # Hugging Face has none
        wrong += [f"{name}: an effect: {seen}"] if seen == without else []
    assert wrong == []


def wrong_values(each: Key) -> list[Any]:
    """Values against the rule of a key."""
    found: list[Any] = [] if each.least is None else [each.least - 1]
    if each.rule is not None:
        for value in (-1.0, 0.0, 3, float("inf"), False, "no-such", (2.0, 1.0)):
            try:
                found += [] if each.rule.holds(value) else [value]
            except TypeError:  # of another type
                continue
    return found


@every_family
def test_a_value_against_the_rule_is_named(kind: type[Any]) -> None:
    for section, name, each in keys_of(kind):
        owner, wrong = owner_of(kind, section), wrong_values(each)
        assert wrong or (each.rule is None and each.least is None), name
        for value in wrong:
            with pytest.raises(ValueError, match=rf"(?m)^{name}: .* was given; .*must be"):
                replace(owner, **{name: value})
        if each.divides:
            whole = getattr(owner, each.divides)
            said = rf"(?m)^{name}: .* it must divide {each.divides} \("
            with pytest.raises(ValueError, match=said):
                replace(owner, **{name: whole + 1})


STRANGERS = ("x", "2", [1], {"a": 1}, True, 1.5, -1, float("inf"), [[]], 10**30)
"""Values of which no key takes all, as a config.json may have them."""


def mistyped(hint: Any) -> Iterator[Any]:
    """Values of another type than a key has."""
    words = str(hint)
    if "int" not in words and "float" not in words:
        yield 7
    if "str" not in words and "Literal" not in words:
        yield "x"
    yield from ({1, 2}, object())
    if "tuple" not in words:
        yield (1, 2)


@every_family
def test_a_value_of_another_type_is_named(kind: type[Any]) -> None:
    for section, name, _ in keys_of(kind):
        owner = owner_of(kind, section)
        for value in mistyped(get_type_hints(type(owner))[name]):
            with pytest.raises(ValueError, match=rf"(?m)^{name}: .*; it must be "):
                replace(owner, **{name: value})


@every_family
def test_whatever_config_json_holds_is_read_or_a_value_error(kind: type[Any]) -> None:
    try:
        good = config_to_hf(base(kind))
    except ValueError:
        pytest.skip("Hugging Face has no such models")
    for name in good:
        for value in STRANGERS:
            with contextlib.suppress(ValueError):
                config_from_hf({**good, name: value})
        without = {key: value for key, value in good.items() if key != name}
        with contextlib.suppress(ValueError):
            config_from_hf(without)


@every_family
def test_a_key_of_config_json_comes_back(kind: type[Any]) -> None:
    own = next(family.hf for family in FAMILIES if family.config is kind)
    for section, name, each in keys_of(kind):
        if not each.hf or not each.at or own is None or (kind, name) in NOT_BACK:
            continue
        compared = 0
        for _, config in accepted(kind, section, name):
            text = written(config)
            if not text or json.loads(text)["model_type"] not in (own.model_type, "qwen2_moe"):
                continue
            read = config_from_hf(json.loads(text))
            if section:
                config, read = getattr(config, section), getattr(read, section)
            usual = {None} if name == "head_dim" else set()
            assert getattr(read, name) in {getattr(config, name), *usual}, name
            compared += 1
        assert compared or each.only or name == "tie_word_embeddings", name


@every_family
def test_a_small_copy_is_valid(kind: type[Any]) -> None:
    for section, name, _ in keys_of(kind):
        for _, config in accepted(kind, section, name):
            small = config.small(SIZES)
            assert (small.decoder.vocab_size, small.decoder.num_hidden_layers) == (96, 4), name


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        (MistralConfig, {"use_cache": True, "pretraining_tp": 1}),
        (JambaConfig, {"rope_theta": 5e5, "rope_interleaved": True, "rope_scaling": None}),
        (DeepseekV3Config, {"head_dim": None, "attention_bias": False}),
        (LlaMoEConfig, {"rope_theta": 1e4, "rope_interleaved": False}),
    ],
)
def test_a_key_that_a_family_does_not_read_is_none_of_its(kind, keys) -> None:
    """Checkpoints that were written with it are read all the same."""
    for name, value in keys.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            kind(**{name: value})
    marker = next(family.marker for family in FAMILIES if family.config is kind)
    assert config_from_json({marker: True, **keys}) == kind()
    with pytest.raises(ValueError, match="unexpected keyword argument 'rope_thet'"):
        config_from_json({marker: True, **keys, "rope_thet": 1.0})
