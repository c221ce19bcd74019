"""Which parameters are treated alike: groups from roles and rules, and the report."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from kenotron_dist import declare_roles
from kenotron_dist.placement import TensorLayout, Tie, parameter_layouts
from kenotron_optim import (
    LRMultiplier,
    ParameterGroup,
    decay_groups,
    describe_groups,
    matrix_parts,
    parameter_groups,
)
from kenotron_optim.config import Kind

NAMES = ["a.bias", "a.weight", "head.weight", "n.weight"]
ROLES = {"a.bias": "bias", "n.weight": "norm", "n.shift": "norm_bias"}
LAYOUTS = {
    name: TensorLayout(name, (2,), role=ROLES.get(name, "hidden")) for name in [*NAMES, "n.shift"]
}


def rule(pattern: str, multiplier: float) -> LRMultiplier:
    return LRMultiplier(pattern=pattern, multiplier=multiplier)


def test_kinds_and_patterns_exclude_from_weight_decay() -> None:
    def free(**rules) -> set[str]:
        groups = parameter_groups(NAMES, 0.1, layouts=LAYOUTS, **rules)
        return {name for group in groups if not group.weight_decay for name in group.names}

    assert free() == set()
    assert free(exclude_kinds=["norms"]) == {"n.weight"}
    assert free(exclude_kinds=["norms", "biases"]) == {"n.weight", "a.bias"}
    assert free(exclude_kinds=["embeddings"]) == set()  # there are none
    assert free(exclude=["head.*"], exclude_kinds=["biases"]) == {"head.weight", "a.bias"}


def test_constants_of_a_state_space_layer_never_decay() -> None:
    layouts = LAYOUTS | {"a.A_log": TensorLayout("a.A_log", (2, 4), role="state")}
    groups = parameter_groups([*NAMES, "a.A_log"], 0.1, layouts=layouts)
    found = {group.names: group.weight_decay for group in groups}
    assert found == {tuple(NAMES): 0.1, ("a.A_log",): 0.0}


def test_kinds_are_roles_that_modules_declare() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.LayerNorm(2), nn.Linear(2, 3), nn.Linear(2, 4))
    declare_roles(model[3], weight="output")
    for each in (model[0], model[3]):
        each.placements = {"weight": Tie("0.weight")}
    layouts = parameter_layouts(model, {})
    names = sorted({layout.name for layout in layouts.values()})

    def free(*kinds: Kind) -> set[str]:
        groups = parameter_groups(names, 0.1, exclude_kinds=kinds, layouts=layouts)
        return {name for group in groups if not group.weight_decay for name in group.names}

    assert free("norms") == {"1.weight", "1.bias"}
    declare_roles(model[1], weight="norm_offset")  # a scale that is stored as w, of 1 + w
    layouts = parameter_layouts(model, {})
    assert free("norms") == {"1.weight", "1.bias"}
    assert free("biases") == {"1.bias", "2.bias", "3.bias"}
    assert free("embeddings") == {"0.weight"}
    assert matrix_parts(layouts).keys() == {"2.weight"}


def test_the_first_rule_that_matches_gives_the_multiplier() -> None:
    rules = [rule(r"head\..*", 0.25), rule(r".*\.weight", 2.0)]
    assert parameter_groups(
        NAMES, 0.1, exclude_kinds=["norms"], layouts=LAYOUTS, lr_multipliers=rules
    ) == [
        ParameterGroup(("a.bias",), 0.1, 1.0),
        ParameterGroup(("head.weight",), 0.1, 0.25),
        ParameterGroup(("a.weight",), 0.1, 2.0),
        ParameterGroup(("n.weight",), 0.0, 2.0),
    ]


def test_groups_with_the_same_options_are_one() -> None:
    rules = [rule("a.*", 1.0), rule("n.*", 3.0), rule("head.*", 3.0)]
    assert parameter_groups(NAMES, 0.0, exclude=["n.*"], lr_multipliers=rules) == [
        ParameterGroup(("a.bias", "a.weight"), 0.0),
        ParameterGroup(("head.weight", "n.weight"), 0.0, 3.0),
    ]
    assert decay_groups(NAMES, 0.0, ["n.*"]) == [ParameterGroup(tuple(NAMES), 0.0)]
    assert parameter_groups([], 0.1) == []


def test_further_factors_multiply_those_of_rules_and_weight_decay() -> None:
    factors = {"a.bias": (1.0, 1.0), "a.weight": (0.5, 2.0), "head.weight": (1.0, 1.0)}
    factors["n.weight"] = (1.0, 3.0)
    rules = [rule("a.*", 4.0)]
    assert parameter_groups(
        NAMES, 0.1, exclude=["n.*"], lr_multipliers=rules, factors_of=factors
    ) == [
        ParameterGroup(("head.weight",), 0.1),
        ParameterGroup(("n.weight",), 0.0),
        ParameterGroup(("a.bias",), 0.1, 4.0),
        ParameterGroup(("a.weight",), 0.2, 2.0),
    ]


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        (
            {"lr_multipliers": [rule("head.wieght", 2.0)]},
            "no parameter is named by 'head.wieght', which shall have a learning rate of its own "
            "(lr_multipliers): a pattern must match a whole name, such as 'head.weight'",
        ),
        (
            {"lr_multipliers": [rule(".*weight", 2.0), rule("head.*", 3.0)]},
            "the rule 'head.*' of lr_multipliers has no effect: earlier rules match all of its "
            "parameters, such as 'head.weight', and the first match counts; put the narrower",
        ),
        ({"exclude": ["bias"]}, "'bias', which shall have no weight decay (exclude): a pattern m"),
        (
            {"exclude_kinds": ["norms"]},
            "exclude_kinds ['norms'] were given without layouts: pass layouts=parameter_layouts",
        ),
    ],
)
def test_rules_without_effect_are_errors(rules: dict, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parameter_groups(NAMES, 0.1, **rules)
    assert sentence in str(caught.value)


def test_a_rule_for_a_model_without_parameters() -> None:
    with pytest.raises(ValueError, match="such as '\\(none\\)'"):
        parameter_groups([], 0.1, exclude=["a"])


def test_the_report_counts_logical_elements_and_shortens_names() -> None:
    names = [f"layers.{i}.w{j}.weight" for i in range(3) for j in range(5)]
    layouts = [TensorLayout(name, (20, 30)) for name in names]
    layouts += [TensorLayout("norm.weight", (7,))] * 2  # tied: two owners
    groups = [
        ParameterGroup(tuple(names), 0.1, 0.5),
        ParameterGroup(("norm.weight",), 0.0),
    ]
    assert describe_groups(groups, layouts).splitlines() == [
        "group  lr x  weight decay  tensors  elements  names",
        "    0   0.5           0.1       15     9,000  layers.*.w0.weight, layers.*.w1.weight, "
        "layers.*.w2.weight, layers.*.w3.weight and 1 more",
        "    1     1             0        1         7  norm.weight",
    ]
    with pytest.raises(ValueError, match="no layout for parameters .'other'.: layouts are of the"):
        describe_groups([ParameterGroup(("other",), 0.0)], layouts)


def roles_of() -> dict[str, TensorLayout]:
    roles = {"embedding.weight": "embedding", "norm.weight": "norm", "head.weight": "output"}
    roles |= {"layers.0.up.weight": "hidden", "layers.0.down.weight": "residual"}
    return {name: TensorLayout(name, (4, 4), role=role) for name, role in roles.items()}


def test_a_role_has_a_learning_rate_of_its_own() -> None:
    layouts = roles_of()
    rules = [
        LRMultiplier(pattern="layers.0.down.*", multiplier=0.5),
        LRMultiplier(role="embedding", multiplier=10.0),
        LRMultiplier(role="hidden", multiplier=0.0),
    ]
    groups = parameter_groups(sorted(layouts), 0.1, layouts=layouts, lr_multipliers=rules)
    assert {name: group.lr_multiplier for group in groups for name in group.names} == {
        "embedding.weight": 10.0, "head.weight": 1.0, "norm.weight": 1.0,
        "layers.0.up.weight": 0.0, "layers.0.down.weight": 0.5,
    }  # fmt: skip


def test_roles_that_mean_nothing_are_named() -> None:
    layouts = roles_of()

    def message(rule: LRMultiplier, **known: Any) -> str:
        with pytest.raises(ValueError) as caught:
            parameter_groups(sorted(layouts), 0.1, lr_multipliers=[rule], **known)
        return str(caught.value)

    router = LRMultiplier(role="router", multiplier=2.0)
    assert "no parameter has the role 'router'" in message(router, layouts=layouts)
    assert "the model's have embedding, hidden, norm" in message(router, layouts=layouts)
    assert "lr_multipliers ['router'] were given without layouts" in message(router)
    with pytest.raises(ValueError, match="one of the two must say which parameters are meant"):
        LRMultiplier(multiplier=2.0)
    with pytest.raises(ValueError, match="pattern: 'a' was given, and role 'norm'"):
        LRMultiplier(pattern="a", role="norm", multiplier=2.0)
    with pytest.raises(ValueError, match="role: 'heads' was given; it must be one of embedding"):
        LRMultiplier(role="heads", multiplier=2.0)  # pyrefly: ignore[bad-argument-type]
