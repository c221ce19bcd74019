"""Capacity of experts: what is dropped, counted and learned from, the same on every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder_gradients import complete, gradients
from torch import Tensor

from kenotron_cp import cut_sequence
from kenotron_dist import Axis, Mesh
from kenotron_dist.testing import on_ranks
from kenotron_models import Build, Context, SmallSizes
from kenotron_models.expert_capacity import capacity_of, drop_beyond_capacity
from kenotron_models.families import DeepseekV3Config, MixtralConfig, MoEConfig
from kenotron_models.layers import Experts, ExpertsSpec, RouterSpec

ROWS, SEQUENCE, TOP_K, EXPERTS, ROOM = 3, 13, 2, 4, 5


def choices() -> Tensor:
    """Distinct experts of each token (B, S, K), the lower ones more often; two are dropped."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.tensor([4.0, 2, 1, 1]).expand(ROWS * SEQUENCE, -1)
    found = weights.multinomial(TOP_K, generator=generator).view(ROWS, SEQUENCE, TOP_K)
    found[1, 2] = -1
    return found


def by_hand(chosen: Tensor) -> Tensor:
    """Token after token of each sample takes a place of its experts, while there is one."""
    kept = chosen.clone()
    for row, sample in enumerate(chosen.tolist()):
        room = [ROOM] * EXPERTS
        for place, token in enumerate(sample):
            for k, expert in enumerate(token):
                if expert >= 0 and room[expert] == 0:
                    kept[row, place, k] = -1
                elif expert >= 0:
                    room[expert] -= 1
    return kept


def dropped_on(mesh: Mesh) -> tuple[Tensor, Tensor]:
    """This rank's choices after dropping, and what they should be."""
    tp, cp = mesh["tp"], mesh["cp"]
    chosen, wanted = choices(), by_hand(choices())
    places = torch.arange(SEQUENCE).expand(ROWS, -1)
    rows = torch.arange(ROWS)[:, None].expand_as(places)

    def own(x: Tensor, fill: int) -> Tensor:
        flat = cut_sequence(x, cp, fill=fill).flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % tp.size), value=fill)
        return padded.chunk(tp.size)[tp.rank]

    def every(x: Tensor) -> Tensor:
        return torch.stack([own(x[..., k], -1) for k in range(TOP_K)], 1)

    kept = drop_beyond_capacity(
        every(chosen), own(rows, ROWS), own(places, SEQUENCE), experts=EXPERTS, capacity=ROOM,
        axes=[tp, cp],
    )  # fmt: skip
    return kept, every(wanted)


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_later_tokens_of_a_sample_are_dropped_on_every_layout(axes: dict[str, int]) -> None:
    assert (by_hand(choices()) != choices()).sum() > 5
    for kept, wanted in on_ranks(dropped_on, **axes):
        assert torch.equal(kept, wanted)


def test_a_dropped_choice_adds_nothing_and_is_counted() -> None:
    torch.manual_seed(0)
    build = Build(Axis.solo("tp"), device=None)
    spec = ExpertsSpec(router=RouterSpec(experts=4, top_k=1), features=6, capacity_factor=1.0)
    layer = Experts(spec, 8, build)
    with torch.no_grad():
        layer.router.weight.zero_()  # all scores are equal: every token chooses expert 0
    x, places = torch.randn(2 * 10, 8), torch.arange(10).expand(2, -1)
    y = layer(x, Context(places, loss_weight=torch.tensor(1.0))).view(2, 10, 8)
    assert capacity_of(1.0, 1, 10, 4) == 3
    assert y[:, :3].any(-1).all() and not y[:, 3:].any()
    assert layer.router.take_drops() == 14 and layer.router.take_load().tolist() == [20, 0, 0, 0]
    assert layer.router.take_drops() == 0
    assert layer(x, Context(places)).any(-1).all()  # an evaluation drops nothing


LAYOUTS = [
    ("sequence", "selective", {"tp": 2, "ep": 2}),
    ("plain", "full", {"cp": 2, "ep": 2}),
    ("plain", "none", {"cp": 2, "tp": 2, "ep": 4}),
]


@pytest.mark.parametrize(("mode", "again", "axes"), LAYOUTS, ids=str)
def test_every_gradient_is_that_of_one_process(mode: str, again: str, axes: dict[str, int]) -> None:
    alone = on_ranks(gradients, "capacity", "plain")
    want, ranks = complete(alone), on_ranks(gradients, "capacity", mode, "ring", again, **axes)
    assert all(rank[0] == pytest.approx(alone[0][0], rel=1e-5) for rank in ranks)
    for path, tensor in complete(ranks).items():
        assert (tensor - want[path]).abs().max() / want[path].abs().max() < 2e-5, path


WRONG: list[tuple[type, dict[str, Any], str]] = [
    (MoEConfig, {"expert_capacity_factor": 0.0}, "0.0 was given; it must be a finite number above"),
    (
        MoEConfig, {"expert_capacity_factor": 4.0},
        "4.0 was given; from num_experts / top_k (4) on there is room for every choice and nothing "
        "is dropped: give less, or null",
    ),
    (MixtralConfig, {"router_jitter_noise": 1.0}, "1.0 was given; it must be at least 0, below 1"),
    (DeepseekV3Config, {"router_aux_loss_type": "batch"}, "one of sample, micro_batch, all_layers"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "keys", "message"), WRONG, ids=str)
def test_contradictory_keys_of_routing_are_refused(
    family: type, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        family(**keys)
    assert str(caught.value).startswith(next(iter(keys))) and message in str(caught.value)


def test_a_factor_without_drops_in_a_small_copy_is_left_out() -> None:
    sizes = SmallSizes(
        layers=4, period=4, heads=4, kv_heads=2, head_dim=8, vocab_size=96, tp=2, sequence=64,
        small_sequence=16,
    )  # fmt: skip
    made = MixtralConfig(num_local_experts=64, num_experts_per_tok=4, expert_capacity_factor=15.0)
    for config in (made, replace(made, expert_capacity_factor=1.25)):
        small = config.small(sizes)
        room = small.num_local_experts / small.num_experts_per_tok
        factor = config.expert_capacity_factor
        assert small.expert_capacity_factor == (factor if factor < room else None)
    assert 1.25 < room < 15.0
