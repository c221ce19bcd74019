"""Which parameters are treated alike: kinds from modules, groups from rules, and the report."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kenotron_dist import TensorLayout, Tie, parameter_layouts
from kenotron_optim import (
    LRMultiplier,
    ParameterGroup,
    decay_groups,
    describe,
    parameter_groups,
    parameter_kinds,
)

NORMS, BIASES, EMBEDDINGS = ({kind} for kind in ("norms", "biases", "embeddings"))


class ScaleNorm(nn.Module):
    """A norm as people write them: one gain, and a matrix that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(()))
        self.mixing = nn.Parameter(torch.ones(2, 2))


class FinalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Renamed(FinalNorm):
    """Known by its base class."""


class Normalised(nn.Linear):
    """A matrix whose class only begins like a norm's."""


class CutTable(nn.Module):
    """Rows of an embedding, as tensor-parallel layers hold them, and a gain that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_embeddings = 10
        self.weight = nn.Parameter(torch.ones(5, 2))
        self.gain = nn.Parameter(torch.ones(2))


class Zoo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(2, 3), Normalised(3, 2)
        self.layer_norm, self.rms = nn.LayerNorm([2, 3]), nn.RMSNorm(3)
        self.group, self.batch, self.inst = (
            nn.GroupNorm(1, 3), nn.BatchNorm2d(3), nn.InstanceNorm1d(3, affine=True),
        )  # fmt: skip
        self.own, self.renamed, self.scale = FinalNorm(), Renamed(), ScaleNorm()
        self.table, self.bag, self.cut = nn.Embedding(4, 2), nn.EmbeddingBag(4, 2), CutTable()
        self.attention = nn.MultiheadAttention(2, 1, add_bias_kv=True)
        self.lstm = nn.LSTM(2, 2)
        self.positions = nn.Parameter(torch.ones(4, 2))
        self.temperature = nn.Parameter(torch.ones(()))
        self.relative_bias = nn.Embedding(4, 1)  # a table, whatever it is called


WANTED = {
    "linear.bias": BIASES,
    "head.bias": BIASES,
    "layer_norm.weight": NORMS,
    "layer_norm.bias": NORMS | BIASES,
    "rms.weight": NORMS,
    "group.weight": NORMS,
    "group.bias": NORMS | BIASES,
    "batch.weight": NORMS,
    "batch.bias": NORMS | BIASES,
    "inst.weight": NORMS,
    "inst.bias": NORMS | BIASES,
    "own.scale": NORMS,
    "renamed.scale": NORMS,
    "scale.g": NORMS,
    "table.weight": EMBEDDINGS,
    "bag.weight": EMBEDDINGS,
    "cut.weight": EMBEDDINGS,
    "relative_bias.weight": EMBEDDINGS,
    "attention.in_proj_bias": BIASES,
    "attention.bias_k": BIASES,
    "attention.bias_v": BIASES,
    "attention.out_proj.bias": BIASES,
    "lstm.bias_ih_l0": BIASES,
    "lstm.bias_hh_l0": BIASES,
}


def kinds_of(model: nn.Module) -> dict:
    return parameter_kinds(model, parameter_layouts(model, {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kinds_come_from_the_modules_that_own_the_parameters(device: str) -> None:
    with torch.device(device):
        model = Zoo()
    assert kinds_of(model) == WANTED


def test_a_wrapper_of_torch_compile_changes_no_name() -> None:
    wrapper = nn.Module()
    wrapper.add_module("_orig_mod", Zoo())
    assert kinds_of(wrapper) == WANTED


def test_a_tied_tensor_has_the_kinds_of_all_its_owners() -> None:
    layers = [nn.Linear(2, 4, bias=False), nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)]
    for layer in layers:
        layer.placements = {"weight": Tie("shared")}
    assert kinds_of(nn.Sequential(*layers)) == {"shared": EMBEDDINGS}
    odd = nn.Module()
    odd.bias = nn.Parameter(torch.ones(4, 2))
    odd.placements = {"bias": Tie("shared")}
    assert kinds_of(nn.Sequential(layers[1], odd)) == {"shared": EMBEDDINGS | BIASES}


def test_kinds_need_the_layouts_of_the_whole_model() -> None:
    with pytest.raises(ValueError, match="no layout for parameter 'weight': layouts are of the w"):
        parameter_kinds(nn.Linear(1, 1), {})


NAMES = ["a.bias", "a.weight", "head.weight", "n.weight"]
KINDS = {"a.bias": frozenset(BIASES), "n.weight": frozenset(NORMS)}


def rule(pattern: str, multiplier: float) -> LRMultiplier:
    return LRMultiplier(pattern=pattern, multiplier=multiplier)


def test_kinds_and_patterns_exclude_from_weight_decay() -> None:
    def free(**rules) -> set[str]:
        groups = parameter_groups(NAMES, 0.1, kinds=KINDS, **rules)
        return {name for group in groups if not group.weight_decay for name in group.names}

    assert free() == set()
    assert free(exclude_kinds=["norms"]) == {"n.weight"}
    assert free(exclude_kinds=["norms", "biases"]) == {"n.weight", "a.bias"}
    assert free(exclude_kinds=["embeddings"]) == set()  # there are none
    assert free(exclude=["head.*"], exclude_kinds=["biases"]) == {"head.weight", "a.bias"}


def test_the_first_rule_that_matches_gives_the_multiplier() -> None:
    rules = [rule(r"head\..*", 0.25), rule(r".*\.weight", 2.0)]
    assert parameter_groups(
        NAMES, 0.1, exclude_kinds=["norms"], kinds=KINDS, lr_multipliers=rules
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
            "exclude_kinds ['norms'] were given without kinds: pass kinds=parameter_kinds(model,",
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
    assert describe(groups, layouts).splitlines() == [
        "group  lr x  weight decay  tensors  elements  names",
        "    0   0.5           0.1       15     9,000  layers.*.w0.weight, layers.*.w1.weight, "
        "layers.*.w2.weight, layers.*.w3.weight and 1 more",
        "    1     1             0        1         7  norm.weight",
    ]
    with pytest.raises(ValueError, match="no layout for parameters .'other'.: layouts are of the"):
        describe([ParameterGroup(("other",), 0.0)], layouts)
