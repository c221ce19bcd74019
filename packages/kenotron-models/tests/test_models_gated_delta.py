"""The gated delta rule's mixer: every layout has one process's gradients, documents, cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from decoder_gradients import DELTA, gradients, recurrent
from mixer_cases import ONE, documents_are_apart, one_by_one_as_in_parallel, same_as_one, stack_of

from kenotron_cp import Cut, Layout
from kenotron_dist import Axis
from kenotron_dist.placement import parameter_layouts
from kenotron_models import Build, Context, LayerStack, build_decoder
from kenotron_models.block_costs import MetaMicroBatch, kept_bytes, sent_bytes
from kenotron_models.layers import BlockSpec

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # 1e-6 is added to squared lengths


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
    same_as_one(gradients, name, (mode, "ring", again), axes, 2e-5)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"cp": 2}], ids=str)
def test_compiled_layers_have_the_same_gradients(axes: dict[str, int]) -> None:
    same_as_one(gradients, "delta", ("plain", "ring", "none", True), axes, 2e-5)


def test_a_mixer_computes_the_formula_of_the_paper() -> None:
    mixer = stack_of(DELTA, separate_documents=False).get_submodule("layers.0.gated_delta")
    own, spec, length = dict(mixer.named_parameters()), DELTA, 7
    groups, keys, values = spec.key_heads, spec.key_dim, spec.value_dim
    each, u = spec.value_heads // groups, torch.randn(length, 24, dtype=torch.float64)
    sizes = keys, keys, each * values, each * values
    made = (u @ own["in_proj.weight"].mT).split((groups * sum(sizes), 2 * spec.value_heads), -1)
    q, k, v, z = made[0].view(length, groups, -1).split(sizes, -1)
    row = F.pad(torch.cat([part.flatten(1) for part in (q, k, v)], -1).mT[None], (3, 0))
    row = F.silu(F.conv1d(row, own["conv.weight"], groups=row.shape[1])[0].mT)
    q, k, v = row.split((groups * keys, groups * keys, spec.value_heads * values), -1)
    q, k = (F.normalize(part.view(length, groups, keys), dim=-1, eps=0) for part in (q, k))
    q, k = (part.repeat_interleave(each, 1) for part in (q * keys**-0.5, k))
    b, a = made[1].view(length, groups, 2, each).unbind(2)
    share, steps = b.flatten(1).sigmoid(), F.softplus(a.flatten(1) + own["dt_bias"])
    left = torch.exp(-own["A_log"].exp() * steps)
    state, outs = torch.zeros(spec.value_heads, keys, values, dtype=torch.float64), []
    for t in range(length):
        state = left[t, :, None, None] * state
        change = v.view(length, -1, values)[t] - torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("h,hk,hv->hkv", share[t], k[t], change)
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    normed = F.rms_norm(torch.stack(outs), (values,), own["norm.weight"], spec.eps)
    gated = normed * F.silu(z.reshape(normed.shape))
    got = mixer(u, Context(torch.arange(length)[None]))
    torch.testing.assert_close(got, gated.flatten(1) @ own["out_proj.weight"].mT, **CLOSE)


def test_nothing_passes_from_one_document_to_another() -> None:
    documents_are_apart(stack_of(DELTA))


def test_512_tokens_one_by_one_are_the_parallel_form() -> None:
    one_by_one_as_in_parallel(stack_of(DELTA))


def test_constants_are_fp32_in_a_bf16_model_and_are_drawn_between_bounds() -> None:
    stack = LayerStack(build_decoder(recurrent(DELTA), replace(ONE, dtype=torch.bfloat16)))
    layouts = parameter_layouts(stack, {"tp": 1})
    own = {n.split("delta.")[1]: p for n, p in stack.named_parameters() if "delta." in n}
    assert {name for name, p in own.items() if p.dtype == torch.float32} == {"A_log", "dt_bias"}
    roles = {n.split("delta.")[1]: each.role for n, each in layouts.items() if "delta." in n}
    assert {name for name, role in roles.items() if role == "state"} == {"A_log", "dt_bias"}
    assert roles["out_proj.weight"] == "residual" and roles["norm.weight"] == "norm"
    values = dict(stack_of(DELTA).named_parameters())
    decays = torch.cat([values[f"layers.{i}.gated_delta.A_log"] for i in range(3)]).exp()
    assert decays.min() > 0.01 and decays.max() < 16 and decays.std() > 2
    steps = torch.nn.functional.softplus(values["layers.1.gated_delta.dt_bias"])
    assert steps.min() >= 1e-3 - 1e-6 and steps.max() <= 0.1


def test_it_is_measured_on_meta() -> None:
    block = BlockSpec(mixer=DELTA, feed_forward=None)
    kept = [kept_bytes(block, 24, MetaMicroBatch(2, size, recompute="none")) for size in (256, 512)]
    assert kept[1] < 2.01 * kept[0]
    assert kept_bytes(block, 24, MetaMicroBatch(2, 512, recompute="selective")) < 0.6 * kept[1]
    cut = Cut(64, 4, Layout())
    once = 2 * 2 * 3 * (72 * 3 * 4 + 4 * 8 * (8 + 10) * 4)  # rows, pieces, peers: tokens, states
    assert sent_bytes(block, 24, MetaMicroBatch(2, 16, tp=2), cut=cut)["cp"] == 2 * once


def test_key_heads_that_do_not_divide_are_named() -> None:
    axis = Axis("tp", 0, (0, 1, 2), backend="nccl")
    with pytest.raises(ValueError, match="cannot split 4 key heads of a gated delta rule over 3 t"):
        build_decoder(recurrent(DELTA), Build(axis))
