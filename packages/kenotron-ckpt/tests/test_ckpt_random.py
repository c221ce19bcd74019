"""Random streams go on where they stood."""

import json
import random

import numpy
import pytest
import torch

from kenotron_ckpt import random_state, restore_random_state


def draws():
    return torch.rand(3).tolist(), random.random(), random.gauss(), numpy.random.rand(2).tolist()


def test_streams_go_on_where_they_stood():
    draws()
    state = json.loads(json.dumps(random_state()))
    due = draws(), draws()
    restore_random_state(state)
    assert (draws(), draws()) == due


@pytest.mark.parametrize("change", [{"torch": "AAAA"}, {"python": [3, [1], None]}, {"torch": 5}])
def test_what_is_no_state_changes_nothing(change):
    state = random_state()
    due = draws()
    restore_random_state(state)
    with pytest.raises(ValueError, match="this is not what random_state"):
        restore_random_state(state | change)
    assert draws() == due
