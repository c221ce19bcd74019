"""Queries, keys and values in one matrix, GPT-2's layers and biases of heads, cut by a plan."""

import planned_fused
import pytest
import torch
from planned_fused import PLAN, DoubleLinear, Model
from test_tp_parallelize import check_runs, on_axis, train

from kenotron_dist.testing import on_ranks
from kenotron_tp import parallelize
from kenotron_tp.plan_checks import unsaid_problems
from kenotron_tp.plan_names import match_plan, with_pieces


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_attention_trains_as_the_whole_one(tp):
    check_runs(on_ranks(train, Model, PLAN, tp == 2, tp=tp), Model(tp == 2))


REFUSALS = [
    (3, {}, "layers.0.attention.num_heads: 3 ranks cannot share 4: choose a tp that divides it"),
    (3, {}, "layers.0.attention.qkv: a piece of 16 output features cannot be cut over 3 ranks"),
    (2, {"layers.*.up": "multi_query_colwise"}, "Layer gives None features of a head, and out_f"),
    (2, {"layers.0.attention.qkv": "colwise"}, "give packed_colwise for two halves, qkv_colwise, "
     "heads_colwise, multi_query_colwise for attention"),
    (2, {"layers.1.attention.qkv": "qkv_colwise", "head": "qkv_colwise"},
     "head: out_features 53 is not three pieces as wide as in_features, 16"),
    (2, {"layers.2.attention.qkv": "qkv_colwise"},
     "out_features 24 is not three pieces as wide as in_features, 16"),
    (2, {"layers.*.attention.num_heads": "replicate"}, "layers.0.attention: own_heads_of_bias is "
     "for attention whose number of heads "),
    (2, {"embedding": "qkv_colwise"}, "embedding: style qkv_colwise is for linear layers"),
    (2, {"layers.*.up": "colwise_gather_output"}, "it is a Conv1D: of styles with their own exch"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "changes", "words"), REFUSALS)
def test_a_fused_matrix_that_cannot_be_cut_is_refused_by_name(ranks, changes, words):
    def refuse(mesh):
        with pytest.raises(ValueError, match=words):
            parallelize(Model(False), PLAN | changes, mesh["tp"])

    on_axis(refuse, ranks)


def test_a_class_that_multiplies_otherwise_is_refused():
    def refuse(mesh):
        model = Model(False)
        model.layers[1].attention.qkv = DoubleLinear(planned_fused.WIDTH, 3 * planned_fused.WIDTH)
        with pytest.raises(ValueError, match="it is a DoubleLinear: only embeddings and what comp"):
            parallelize(model, PLAN, mesh["tp"])

    on_axis(refuse, 2)


def test_frozen_parameters_stay_frozen():
    def follow(mesh):
        model = Model(False).requires_grad_(False)
        model.layers[0].up.bias.requires_grad_(True)
        parallelize(model, PLAN, mesh["tp"])
        learning = [name for name, each in model.named_parameters() if each.requires_grad]
        assert learning == ["layers.0.up.bias"]

    on_axis(follow, 2)


def test_what_is_next_to_biases_of_heads_must_be_named():
    model = Model(False)
    model.layers[0].attention.register_buffer("slopes", torch.ones(planned_fused.HEAD))
    named, problems = with_pieces(model, match_plan(model, PLAN)[0])
    found = unsaid_problems(model, named)
    assert not problems and found
    assert all(each.startswith("layers.0.attention.slopes: this buffer is ne") for each in found)
