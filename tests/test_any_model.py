"""Every family of transformers with a tp plan computes over two ranks what its plain model does."""

import any_model
import pytest
from tiny_transformers import families

from kenotron_dist.testing import on_ranks

pytest.importorskip("transformers")
GROUPS = 10


@pytest.mark.by_turns(4)
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


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("kind", SUGGESTED)
def test_a_plan_found_by_names_is_the_plain_model(kind):
    found = on_ranks(any_model.suggested, kind, tp=2, preload=any_model.PRELOAD)
    for plan, deviation in found:
        ends = {name.partition(".*.")[2] for name in plan}
        assert ends.issuperset(SUGGESTED[kind]) and deviation < any_model.GRADIENT


def test_the_page_has_every_family():
    assert {*any_model.written()} == {*families()}
