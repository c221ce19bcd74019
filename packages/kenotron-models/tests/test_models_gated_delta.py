"""The gated delta rule's mixer: every layout has one process's gradients, documents, cache."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from decoder_gradients import DELTA, complete, gradients, recurrent
from torch import Tensor

from kenotron_cp import Cut, Layout
from kenotron_dist import Axis, GridView, parameter_layouts, spawn
from kenotron_dist.init import initialize
from kenotron_models import (
    BlockSpec,
    Build,
    Context,
    KVCache,
    LayerStack,
    build_decoder,
    kept_bytes,
    sent_bytes,
    standard_init,
)

ONE = Build(Axis.solo("tp"))


@cache
def on_one(name: str) -> tuple[float, dict[str, Tensor]]:
    ranks = spawn(gradients, name, "plain")
    return ranks[0][0], complete(ranks)


LAYOUTS = [
    ("delta", "plain", "none", {"tp": 2}),
    ("delta", "sequence", "selective", {"tp": 4}),
    ("delta", "plain", "selective", {}),
    ("delta", "plain", "none", {"cp": 2}),
    ("delta", "plain", "selective", {"cp": 4}),
    ("delta", "sequence", "full", {"cp": 2, "tp": 2}),
    ("delta-one-text", "sequence", "full", {"tp": 2}),
    ("delta-one-text", "plain", "selective", {"cp": 2}),
    ("delta-one-text", "plain", "none", {"cp": 4}),
]


@pytest.mark.parametrize(("name", "mode", "again", "axes"), LAYOUTS, ids=str)
def test_every_gradient_is_that_of_one_process(
    name: str, mode: str, again: str, axes: dict[str, int]
) -> None:
    loss, want = on_one(name)
    ranks = spawn(gradients, name, mode, "ring", again, **axes)
    assert all(rank[0] == pytest.approx(loss, rel=1e-5) for rank in ranks)
    got = complete(ranks)
    assert set(got) == set(want)
    for path, tensor in want.items():
        deviation = (got[path] - tensor).abs().max() / tensor.abs().max()
        assert deviation < 2e-5, path


@pytest.mark.parametrize("axes", [{"tp": 2}, {"cp": 2}], ids=str)
def test_compiled_layers_have_the_same_gradients(axes: dict[str, int]) -> None:
    loss, want = on_one("delta")
    ranks = spawn(gradients, "delta", "plain", "ring", "none", True, **axes)
    assert ranks[0][0] == pytest.approx(loss, rel=1e-5)
    for path, tensor in complete(ranks).items():
        assert (tensor - want[path]).abs().max() / want[path].abs().max() < 2e-5, path


def stack_of(**changes: object) -> LayerStack:
    spec = recurrent(replace(DELTA, **changes))
    stack = LayerStack(build_decoder(spec, replace(ONE, dtype=torch.float64)))
    layouts = parameter_layouts(stack, {"tp": 1})
    stack.to_empty(device="cpu")
    view = GridView.at({"pp": 1, "dp": 1, "cp": 1, "tp": 1}, 0)
    initialize(stack, layouts, lambda _: view, seed=1, initializer=standard_init(spec, 0.4))
    return stack


def test_nothing_passes_from_one_document_to_another() -> None:
    stack = stack_of()
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    x = torch.randn(9, 24, dtype=torch.float64, requires_grad=True)
    y = stack.get_submodule("layers.0")(x, Context(positions))
    y[5:].sum().backward()
    assert x.grad is not None
    assert x.grad[:5].count_nonzero() == 0 and x.grad[5:].count_nonzero() == 4 * 24
    alone = stack.get_submodule("layers.0")(x[5:], Context(positions[:, 5:]))
    torch.testing.assert_close(y[5:], alone, rtol=1e-12, atol=1e-12)


def test_512_tokens_one_by_one_are_the_parallel_form() -> None:
    """Texts of different lengths are read at once, then continue token by token."""
    stack, lengths, total = stack_of(), [3, 1, 7], 512
    tokens = (torch.arange(3 * total) * 13 % 32).view(3, total)
    with torch.no_grad():
        whole = stack(tokens.flatten(), Context(torch.arange(total).expand(3, -1)))
        whole = whole.view(3, total, -1)
        kept = KVCache(total)
        first = max(lengths)
        places = torch.arange(first).expand(3, -1)
        padding = places >= torch.tensor(lengths)[:, None]
        kept.begin(first, equal_lengths=False)
        read = torch.where(padding, 31, tokens[:, :first]).flatten()
        stack(read, Context(places, cache=kept, padding_BS=padding))
        for step in range(total - first):
            at = torch.tensor(lengths)[:, None] + step
            kept.begin(first + step + 1, equal_lengths=False)
            got = stack(tokens.gather(1, at).flatten(), Context(at, cache=kept))
            want = whole[torch.arange(3), at[:, 0]]
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_constants_are_fp32_in_a_bf16_model_and_are_drawn_between_bounds() -> None:
    stack = LayerStack(build_decoder(recurrent(DELTA), replace(ONE, dtype=torch.bfloat16)))
    layouts = parameter_layouts(stack, {"tp": 1})
    own = {n.split("delta.")[1]: p for n, p in stack.named_parameters() if "delta." in n}
    assert {name for name, p in own.items() if p.dtype == torch.float32} == {"A_log", "dt_bias"}
    roles = {n.split("delta.")[1]: each.role for n, each in layouts.items() if "delta." in n}
    assert {name for name, role in roles.items() if role == "state"} == {"A_log", "dt_bias"}
    assert roles["out_proj.weight"] == "residual" and roles["norm.weight"] == "norm"
    values = dict(stack_of().named_parameters())
    decays = torch.cat([values[f"layers.{i}.gated_delta.A_log"] for i in range(3)]).exp()
    assert decays.min() > 0.01 and decays.max() < 16 and decays.std() > 2
    steps = torch.nn.functional.softplus(values["layers.1.gated_delta.dt_bias"])
    assert steps.min() >= 1e-3 - 1e-6 and steps.max() <= 0.1


def test_it_is_measured_on_meta() -> None:
    block = BlockSpec(mixer=DELTA, feed_forward=None)
    kept = [kept_bytes(block, 24, 2, size, recompute="none") for size in (256, 512)]
    assert kept[1] < 2.01 * kept[0]
    assert kept_bytes(block, 24, 2, 512, recompute="selective") < 0.6 * kept[1]
    cut = Cut(64, 4, Layout())
    once = 2 * 2 * 3 * (72 * 3 * 4 + 4 * 8 * (8 + 10) * 4)  # rows, pieces, peers: tokens, states
    assert sent_bytes(block, 24, 2, 16, tp=2, cut=cut)["cp"] == 2 * once


def test_key_heads_that_do_not_divide_are_named() -> None:
    axis = Axis("tp", 0, (0, 1, 2), backend="nccl")
    with pytest.raises(ValueError, match="cannot split 4 key heads of a gated delta rule over 3 t"):
        build_decoder(recurrent(DELTA), Build(axis))
