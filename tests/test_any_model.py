"""Every family of transformers with a tp plan computes over two ranks what its plain model does."""

import any_model
import pytest
from tiny_transformers import families

from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks

pytest.importorskip("transformers")
GROUPS = 10


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_family_over_tp_is_its_plain_model_and_the_page_says_so(group):
    kinds = families()[group::GROUPS]
    rows = any_model.written()
    assert any_model.walk(kinds) == sorted(rows[kind] for kind in kinds)


SUGGESTED = {
    "stablelm": ("self_attn.q_proj", "mlp.down_proj"),
    "opt": ("self_attn.out_proj", "fc1"),
    "biogpt": ("self_attn.v_proj", "fc2"),
    "bloom": ("mlp.dense_h_to_4h",),
    "persimmon": ("mlp.dense_4h_to_h",),
}


@pytest.mark.by_turns(7)
@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("kind", [kind for kinds in any_model.planless() for kind in kinds])
def test_a_family_without_a_plan_is_its_plain_model_to_the_bit(kind):
    found, cut, pp = any_model.deviations(Mesh.connect(), kind)
    assert len(found) > 10 and not any(found.values()) and cut.startswith("0 of")
    assert pp == ("yes" if kind in any_model.planless()[0] else "no")


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("kind", SUGGESTED)
def test_a_plan_found_by_names_is_the_plain_model(kind):
    found = on_ranks(any_model.suggested, kind, tp=2, preload=any_model.PRELOAD)
    for plan, deviation in found:
        ends = {name.partition(".*.")[2] for name in plan}
        assert ends.issuperset(SUGGESTED[kind]) and deviation < any_model.GRADIENT


@pytest.mark.parametrize("sizes", [{"tp": 1}, {"tp": 2}, {"tp": 2, "ep": 2}])
def test_the_balance_loss_of_every_family_is_that_of_its_plain_model(sizes):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kinds = [k for k in families() if hasattr(CONFIG_MAPPING[k](), "output_router_logits")]
    for found in on_ranks(any_model.compare_balance, kinds, **sizes, preload=any_model.PRELOAD):
        compared = {kind: x for kind, x in found.items() if isinstance(x, float)}
        assert all(x < any_model.GRADIENT for x in compared.values()), compared
        assert len(compared) >= LEAST
        assert "ep" in sizes or "its balance loss is computed in a way that " in found["doge"]


LEAST = 22
"""Families that are compared; others are refused by name."""


def test_the_page_has_every_family():
    assert {*any_model.written()} == {*families()}
