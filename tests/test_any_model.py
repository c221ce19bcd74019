"""Every family of transformers with a tp plan computes over two ranks what its plain model does."""

from functools import partial

import any_model
import any_model_balance
import pytest
from tiny_transformers import families, tiny_json

from kenotron_dist import Axis, Mesh
from kenotron_dist.testing import on_ranks
from kenotron_models import Build, build_decoder
from kenotron_models.families import TransformersConfig

pytest.importorskip("transformers")
GROUPS = 10


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_family_over_tp_is_its_plain_model_and_the_page_says_so(group):
    kinds = families()[group::GROUPS]
    rows = any_model.written()
    assert any_model.walk(kinds) == sorted(rows[kind] for kind in kinds)


SUGGESTED = [  # ranks, family, changes of its tiny config, and what the plan has
    (2, "stablelm", {}, {"self_attn.q_proj": "colwise", "mlp.down_proj": "rowwise"}),
    (2, "opt", {}, {"self_attn.out_proj": "rowwise", "fc1": "colwise"}),
    (2, "biogpt", {}, {"self_attn.v_proj": "colwise", "fc2": "rowwise"}),
    (2, "bloom", {}, {"self_attention": "own_heads_of_bias",
                      "self_attention.query_key_value": "heads_colwise"}),
    (2, "persimmon", {}, {"self_attn.query_key_value": "heads_colwise",
                          "self_attn.q_layernorm": "replicated_with_grad_allreduce"}),
    (4, "gpt2", {}, {"attn.c_attn": "qkv_colwise", "mlp.c_proj": "rowwise"}),
    (2, "openai-gpt", {}, {"attn.c_attn": "qkv_colwise", "attn.bias": "replicate"}),
    (2, "mpt", {}, {"attn": "own_heads_of_bias", "attn.Wqkv": "qkv_colwise"}),
    (4, "gpt_bigcode", {}, {"attn.c_attn": "multi_query_colwise", "attn.kv_dim": "replicate"}),
    (2, "gpt_bigcode", {"multi_query": False}, {"attn.c_attn": "heads_colwise"}),
    (4, "falcon", {}, {"self_attention.query_key_value": "multi_query_colwise"}),
    (2, "falcon", {"alibi": True, "multi_query": False, "bias": True},
     {"self_attention.query_key_value": "heads_colwise", "self_attention": "own_heads_of_bias"}),
    (2, "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2},
     {"self_attention.num_kv_heads": "divide", "self_attention.query_key_value": "heads_colwise"}),
    (2, "ctrl", {}, {"multi_head_attention.Wq": "colwise"}),
]  # fmt: skip


@pytest.mark.by_turns(7)
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("kind", [kind for kinds in any_model.planless() for kind in kinds])
def test_a_family_without_a_plan_is_its_plain_model_to_the_bit(kind):
    found, cut, pp, again = any_model.deviations(Mesh.connect(), kind)
    assert len(found) > 10 and not any(found.values()) and cut.startswith("0 of")
    assert pp == ("yes" if kind in any_model.planless()[0] else "no")
    assert again == ("yes" if pp == "yes" else any_model.ONE_PIECE)


@pytest.mark.by_turns(7)
@pytest.mark.parametrize(("tp", "kind", "changes", "styles"), SUGGESTED)
def test_a_plan_found_by_names_is_the_plain_model(tp, kind, changes, styles):
    compared = partial(any_model.suggested, kind=kind, **changes)
    for plan, deviation in on_ranks(compared, tp=tp, preload=any_model.PRELOAD):
        found = {name.partition(".*.")[2]: style for name, style in plan.items()}
        assert found.items() >= styles.items() and deviation < any_model.GRADIENT


def test_a_model_that_computes_with_weights_that_are_cut_is_refused():
    text = tiny_json("bloom", slow_but_exact=True, pretraining_tp=2)
    spec = TransformersConfig(config_json=text, tp_plan={"lm_head": "replicate"}).decoder
    with pytest.raises(ValueError, match="slow_but_exact is true in the config.json of a bloom"):
        build_decoder(spec, Build(Axis("tp", 0, (0, 1))))


@pytest.mark.parametrize("sizes", [{"tp": 1}, {"tp": 2}, {"tp": 2, "ep": 2}])
def test_the_balance_loss_of_every_family_is_that_of_its_plain_model(sizes):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = [k for k in families() if hasattr(CONFIG_MAPPING[k](), "output_router_logits")]
    for found in on_ranks(
        any_model_balance.compare_balance, kinds, **sizes, preload=any_model.PRELOAD
    ):
        compared = {kind: x for kind, x in found.items() if isinstance(x, float)}
        assert all(x < any_model.GRADIENT for x in compared.values()), compared
        assert len(compared) >= LEAST
        assert "ep" in sizes or "its balance loss is computed in a way that " in found["doge"]


LEAST = 22
"""Families that are compared; others are refused by name."""


def test_the_page_has_every_family():
    assert {*any_model.written()} == {*families()}
