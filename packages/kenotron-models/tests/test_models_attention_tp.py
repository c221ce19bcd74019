"""Attention with all its variations over tp: logits and every gradient are one process's."""

from __future__ import annotations

import pytest
from decoder_gradients import MODES, complete, gradients
from torch import Tensor

from kenotron_dist import spawn


@pytest.fixture(
    scope="module", params=["all", "blocked", "mqa", "width", "capped", "sinks", "all-variants"]
)
def one(request: pytest.FixtureRequest) -> tuple[str, float, dict[str, Tensor]]:
    ranks = spawn(gradients, request.param, "plain")
    return request.param, ranks[0][0], complete(ranks)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("tp", [2, 4])
def test_every_gradient_is_that_of_one_process(
    one: tuple[str, float, dict[str, Tensor]], tp: int, mode: str
) -> None:
    name, loss, want = one
    ranks = spawn(gradients, name, mode, tp=tp)
    assert all(rank[0] == pytest.approx(loss, rel=1e-5) for rank in ranks)
    got = complete(ranks)
    assert {"layers.0.attention.q_norm.weight", "layers.2.attention.k_norm.weight"} <= set(want)
    assert set(got) == set(want)
    for path, tensor in want.items():
        deviation = (got[path] - tensor).abs().max() / tensor.abs().max()
        assert deviation < 2e-5, path
