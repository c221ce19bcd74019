"""Plans that are found by the names and shapes of layers."""

from torch import nn

from kenotron_models.transformers_structure import found_plan


def test_no_plan_is_found_where_keys_are_fewer_than_queries_in_one_matrix():
    def plan(features):
        layers = {"Wqkv": nn.Linear(64, features), "out_proj": nn.Linear(64, 64)}
        return found_plan(nn.ModuleDict({"attn": nn.ModuleDict(layers)}))

    assert plan(96) == {} and plan(192)["attn.Wqkv"] == "qkv_colwise"
