"""What modules declare of their parameters, and what stands where they declare nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kenotron_dist import declare_roles, named_roles
from kenotron_dist.placement import Tie, parameter_layouts

BIAS = "bias"


class OwnNorm(nn.Module):
    """A norm that declares its scale by its class, and a matrix that it does not declare."""

    roles = {"scale": "norm"}

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.mixing = nn.Parameter(torch.ones(2, 2))


class Renamed(OwnNorm):
    """Inherits the roles of its base."""


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
        declare_roles(self.head, weight="output")
        self.layer_norm, self.rms = nn.LayerNorm([2, 3]), nn.RMSNorm(3)
        self.plain_norm = nn.LayerNorm(2, bias=False)
        self.group, self.batch, self.inst = (
            nn.GroupNorm(1, 3), nn.BatchNorm2d(3), nn.InstanceNorm1d(3, affine=True),
        )  # fmt: skip
        self.own, self.renamed = OwnNorm(), Renamed()
        self.table, self.bag = nn.Embedding(4, 2), nn.EmbeddingBag(4, 2)
        self.attention = nn.MultiheadAttention(2, 1, add_bias_kv=True)
        self.lstm = nn.LSTM(2, 2)
        self.positions = nn.Parameter(torch.ones(4, 2))
        self.temperature = nn.Parameter(torch.ones(()))
        self.relative_bias = nn.Embedding(4, 1)  # a table, whatever it is called


WANTED = {
    "linear.weight": "hidden",
    "linear.bias": BIAS,
    "head.weight": "output",
    "head.bias": BIAS,
    "layer_norm.weight": "norm",
    "layer_norm.bias": "norm_bias",
    "rms.weight": "norm",
    "plain_norm.weight": "norm",
    "group.weight": "norm",
    "group.bias": "norm_bias",
    "batch.weight": "norm",
    "batch.bias": "norm_bias",
    "inst.weight": "norm",
    "inst.bias": "norm_bias",
    "own.scale": "norm",
    "own.mixing": "hidden",
    "renamed.scale": "norm",
    "renamed.mixing": "hidden",
    "table.weight": "embedding",
    "bag.weight": "embedding",
    "attention.in_proj_weight": "hidden",
    "attention.in_proj_bias": BIAS,
    "attention.bias_k": BIAS,
    "attention.bias_v": BIAS,
    "attention.out_proj.weight": "hidden",
    "attention.out_proj.bias": BIAS,
    "lstm.weight_ih_l0": "hidden",
    "lstm.weight_hh_l0": "hidden",
    "lstm.bias_ih_l0": BIAS,
    "lstm.bias_hh_l0": BIAS,
    "positions": "hidden",
    "temperature": "other",
    "relative_bias.weight": "embedding",
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_roles_come_from_the_modules_that_own_the_parameters(device):
    with torch.device(device):
        model = Zoo()
    assert named_roles(model) == WANTED
    assert named_roles(copy.deepcopy(model)) == WANTED
    found = {path: layout.role for path, layout in parameter_layouts(model, {}).items()}
    assert found == WANTED


def test_a_wrapper_of_torch_compile_changes_no_name():
    wrapper = nn.Module()
    wrapper.add_module("_orig_mod", Zoo())
    assert named_roles(wrapper) == WANTED


def test_later_declarations_add_to_earlier_ones():
    layer = nn.Linear(2, 2)
    declare_roles(layer, weight="output", bias="other")
    declare_roles(layer, weight="router")
    assert named_roles(layer) == {"weight": "router", "bias": "other"}
    own = OwnNorm()
    declare_roles(own, mixing="state")
    assert named_roles(own) == {"scale": "norm", "mixing": "state"}
    assert OwnNorm.roles == {"scale": "norm"}


def tied(*roles):
    """Layers of one logical tensor, each with its role."""
    layers = [nn.Linear(2, 4, bias=False) for _ in roles]
    for layer, role in zip(layers, roles, strict=True):
        layer.placements = {"weight": Tie("shared")}
        if role is not None:
            declare_roles(layer, weight=role)
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("roles", "role"),
    [
        (("embedding", "output"), "embedding"),
        ((None, "embedding", None), "embedding"),
        (("output", None), "output"),
        (("residual", "residual"), "residual"),
        ((None, None), "hidden"),
    ],
)
def test_a_tied_tensor_has_one_role(roles, role):
    layouts = parameter_layouts(tied(*roles), {})
    assert {layout.role for layout in layouts.values()} == {role}


def test_owners_of_a_tied_tensor_agree():
    words = "tied parameters of 'shared' have the roles bias, embedding: declare one role for all"
    with pytest.raises(ValueError, match=words):
        parameter_layouts(tied("embedding", "bias"), {})


def test_a_role_needs_a_parameter_and_a_known_name():
    layer = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="Linear has no parameter 'bias'; declare roles on the mo"):
        declare_roles(layer, bias="bias")
    with pytest.raises(ValueError, match="role 'matrix' was declared for 'weight'; it must be one"):
        declare_roles(layer, weight="matrix")
    layer.roles = {"bias": "bias"}  # a class may declare what some of its objects are made without
    assert named_roles(layer) == {"weight": "hidden"}
    layer.roles = {"scale": "norm"}
    words = "role without a parameter: '0.scale' is declared in roles, but Linear has no parameter"
    with pytest.raises(ValueError, match=words):
        named_roles(nn.Sequential(layer))
    layer.roles = {"weight": "wieght"}
    with pytest.raises(ValueError, match=r"role 'wieght' was declared for '0\.weight'; it must be"):
        named_roles(nn.Sequential(layer))
