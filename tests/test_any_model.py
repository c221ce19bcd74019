"""Every family of transformers with a tp plan computes over two ranks what its plain model does."""

import any_model
import pytest
from tiny_transformers import families

pytest.importorskip("transformers")
GROUPS = 10


@pytest.mark.by_turns(4)
@pytest.mark.parametrize("group", range(GROUPS))
def test_a_family_over_tp_is_its_plain_model_and_the_page_says_so(group):
    kinds = families()[group::GROUPS]
    rows = any_model.written()
    assert any_model.walk(kinds) == [rows[kind] for kind in sorted(kinds)]


def test_the_page_has_every_family():
    assert {*any_model.written()} == {*families()}
