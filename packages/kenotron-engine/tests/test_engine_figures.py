"""Speed of a step, and whole tensors from the pieces of all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from engine_cases import LLAMA

from kenotron_engine import flops_utilization, join_pieces, tflops_per_rank
from kenotron_models import training_flops


def test_speed_is_flops_over_seconds_and_ranks() -> None:
    flops = training_flops(LLAMA.decoder, 8, 12)
    found = tflops_per_rank(LLAMA.decoder, 8, 12, seconds=2.0, ranks=4, useful=0.5)
    assert found == pytest.approx(flops / 2 / 2 / 4 / 1e12)
    assert flops_utilization(found, 1e9) == pytest.approx(found * 1e3)
    assert flops_utilization(found, None) is None


def test_replicas_that_differ_are_refused_by_name() -> None:
    pieces = [[("a", (0,), np.array([1.0, 2.0]), (3,))], [("a", (1,), np.array([2.0, 3.0]), (3,))]]
    assert np.array_equal(join_pieces(pieces)["a"], [1.0, 2.0, 3.0])
    other = [[*pieces[0]], [("a", (1,), np.array([2.5, 3.0]), (3,))]]
    with pytest.raises(ValueError, match="same part of 'a' do not agree"):
        join_pieces(other)
    assert np.array_equal(join_pieces(other, check=False)["a"], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="no rank has all of 'a': 1 elements missing"):
        join_pieces(pieces[:1])
