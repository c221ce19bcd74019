"""Mamba's mixer: layouts have one process's gradients, documents, cache, and parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from decoder_gradients import MAMBA, gradients_fp64, recurrent
from mixer_cases import ONE, documents_are_apart, one_by_one_as_in_parallel, same_as_one, stack_of

from kenotron_cp import Cut, Layout
from kenotron_dist import Axis
from kenotron_dist.placement import parameter_layouts
from kenotron_models import Build, Context, LayerStack, build_decoder
from kenotron_models.block_costs import MetaMicroBatch, kept_bytes, sent_bytes
from kenotron_models.layers import BlockSpec, KVCache, NormSpec
from kenotron_models.state_init import FirstSteps

LAYOUTS = [
    ("mamba", "plain", "none", {"tp": 2}),
    ("mamba", "sequence", "selective", {"tp": 2}),
    ("mamba", "sequence", "full", {"tp": 4}),
    ("mamba", "plain", "selective", {}),
    ("mamba", "plain", "none", {"cp": 2}),
    ("mamba", "plain", "selective", {"cp": 4}),
    ("mamba", "sequence", "full", {"cp": 2, "tp": 2}),
    ("mamba-normed", "sequence", "selective", {"tp": 2}),
    ("mamba-normed", "plain", "full", {"cp": 2, "tp": 2}),
    ("mamba-one-text", "plain", "none", {"tp": 4}),
    ("mamba-one-text", "plain", "none", {"cp": 4}),
    ("mamba-one-text", "sequence", "selective", {"cp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("name", "mode", "again", "axes"), LAYOUTS, ids=str)
def test_every_gradient_is_that_of_one_process(
    name: str, mode: str, again: str, axes: dict[str, int]
) -> None:
    same_as_one(gradients_fp64, name, (mode, "ring", again), axes, 1e-11)


@pytest.mark.parametrize("axes", [{"cp": 2}, {"cp": 4, "tp": 2}], ids=str)
def test_runs_of_tokens_one_after_another_have_the_same_gradients(axes: dict[str, int]) -> None:
    """The first rank's state is 0 for certain, and it takes part in the backward all the same."""
    how = "plain", "ring", "none", False, 1, "contiguous"
    same_as_one(gradients_fp64, "mamba", how, axes, 1e-11)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"cp": 2}], ids=str)
def test_compiled_layers_have_the_same_gradients(axes: dict[str, int]) -> None:
    same_as_one(gradients_fp64, "mamba", ("plain", "ring", "none", True), axes, 1e-11)


@pytest.mark.parametrize("inner", [None, NormSpec(eps=0.01)], ids=["mamba", "jamba"])
def test_a_mixer_computes_the_formula_of_the_paper(inner: NormSpec | None) -> None:
    stack = stack_of(MAMBA, separate_documents=False, inner_norm=inner)
    mixer = stack.get_submodule("layers.0.mamba")
    own = dict(mixer.named_parameters())
    u = torch.randn(7, 24, dtype=torch.float64)
    x, z = F.linear(u, own["in_proj.weight"], own["in_proj.bias"]).chunk(2, -1)
    row = F.pad(x.mT[None], (3, 0))
    x = F.silu(F.conv1d(row, own["conv.weight"], own["conv.bias"], groups=16)[0].mT)
    low, b, c = (x @ own["x_proj.weight"].mT).split((3, 6, 6), -1)
    if inner is not None:
        for name in ("dt_norm", "b_norm", "c_norm"):
            torch.nn.init.uniform_(own[f"{name}.weight"], 0.5, 1.5)
        low = F.rms_norm(low, (3,), own["dt_norm.weight"], 0.01)
        b, c = (F.rms_norm(x, (6,), own[f"{n}_norm.weight"], 0.01) for n, x in (("b", b), ("c", c)))
    d = F.softplus(low @ own["dt_proj.weight"].mT + own["dt_proj.bias"])
    state, outs = torch.zeros(16, 6, dtype=torch.float64), []
    for t in range(7):
        state = torch.exp(-d[t, :, None] * own["A_log"].exp()) * state
        state = state + (d[t] * x[t])[:, None] * b[t]
        outs.append(state @ c[t] + own["D"] * x[t])
    gated = torch.stack(outs) * F.silu(z)
    want = F.linear(gated, own["out_proj.weight"], own["out_proj.bias"])
    got = mixer(u, Context(torch.arange(7)[None]))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_nothing_passes_from_one_document_to_another() -> None:
    documents_are_apart(stack_of(MAMBA))


def test_a_text_runs_on_unless_documents_are_separate() -> None:
    stack = stack_of(MAMBA, separate_documents=False)
    x = torch.randn(9, 24, dtype=torch.float64)
    positions = [torch.tensor([row]) for row in ([0, 1, 2, 3, 4, 0, 1, 2, 3], [*range(9)])]
    y, z = (stack.get_submodule("layers.0")(x, Context(each)) for each in positions)
    assert torch.equal(y, z)


def test_512_tokens_one_by_one_are_the_parallel_form() -> None:
    one_by_one_as_in_parallel(stack_of(MAMBA))


def test_several_tokens_at_once_go_on_from_a_state() -> None:
    stack, tokens = stack_of(MAMBA), torch.arange(40) * 13 % 32
    with torch.no_grad():
        whole = stack(tokens, Context(torch.arange(40)[None]))
        kept, found = KVCache(40), []
        for part in torch.arange(40).split((5, 2, 1, 32)):
            kept.begin(int(part[-1]) + 1, equal_lengths=True)
            found.append(stack(tokens[part], Context(part[None], cache=kept)))
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-9, atol=1e-9)


def test_constants_are_fp32_in_a_bf16_model_and_begin_as_the_paper_says() -> None:
    spec = recurrent(replace(MAMBA, steps=FirstSteps(0.01, 0.5, 0.02)))
    stack = LayerStack(build_decoder(spec, replace(ONE, dtype=torch.bfloat16)))
    layouts = parameter_layouts(stack, {"tp": 1})
    wide = {"A_log", "D", "dt_proj.bias"}
    own = {name.split("mamba.")[1]: p for name, p in stack.named_parameters() if "mamba." in name}
    assert {name for name, p in own.items() if p.dtype == torch.float32} == wide
    roles = {n.split("mamba.")[1]: each.role for n, each in layouts.items() if "mamba." in n}
    assert {name for name, role in roles.items() if role == "state"} == wide
    assert roles["out_proj.weight"] == "residual" and roles["conv.weight"] == "filter"
    values = dict(stack_of(MAMBA, steps=FirstSteps(0.01, 0.5, 0.02)).named_parameters())
    log = torch.arange(1, 7, dtype=torch.float32).log().expand(16, 6)
    assert torch.equal(values["layers.1.mamba.A_log"].float(), log)
    assert torch.equal(values["layers.1.mamba.D"], torch.ones(16, dtype=torch.float64))
    steps = F.softplus(values["layers.1.mamba.dt_proj.bias"])
    assert steps.min() >= 0.02 - 1e-6 and steps.max() <= 0.5 and steps.std() > 0.02
    assert values["layers.1.mamba.conv.weight"].abs().max() <= 0.5
    assert values["layers.1.mamba.dt_proj.weight"].abs().max() <= 3**-0.5


def test_it_is_measured_on_meta() -> None:
    block = BlockSpec(mixer=MAMBA, feed_forward=None)
    kept = [kept_bytes(block, 24, MetaMicroBatch(2, size, recompute="none")) for size in (256, 512)]
    assert kept[1] <= 2 * kept[0]
    assert kept_bytes(block, 24, MetaMicroBatch(2, 512, recompute="selective")) < kept[1]
    cut = Cut(64, 4, Layout())
    sent = sent_bytes(block, 24, MetaMicroBatch(2, 16, tp=2), cut=cut)
    once = 2 * 2 * 3 * 8 * (3 * 4 + 2 * 6 * 4)  # rows, pieces, peers, channels
    assert sent["cp"] == 2 * once
    assert (
        sent_bytes(block, 24, MetaMicroBatch(2, 160, tp=2), cut=Cut(640, 4, Layout()))["cp"]
        == sent["cp"]
    )


def test_channels_that_do_not_divide_are_named() -> None:
    axis = Axis("tp", 0, (0, 1, 2), backend="nccl")
    with pytest.raises(ValueError, match="cannot split 16 channels over 3 tp ranks: choose a tens"):
        build_decoder(recurrent(MAMBA), Build(axis))
