"""Mamba-2's mixer: every layout has one process's gradients, documents, cache, and its norm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from decoder_gradients import MAMBA2, gradients_fp64, recurrent
from mixer_cases import ONE, documents_are_apart, one_by_one_as_in_parallel, same_as_one, stack_of

from kenotron_cp import Cut, Layout
from kenotron_dist import Axis
from kenotron_dist.placement import parameter_layouts
from kenotron_models import Build, Context, LayerStack, build_decoder
from kenotron_models.block_costs import MetaMicroBatch, kept_bytes, sent_bytes
from kenotron_models.gated_norm import GatedGroupNorm
from kenotron_models.layers import BlockSpec

LAYOUTS = [
    ("mamba2", "plain", "none", {"tp": 2}),
    ("mamba2", "sequence", "selective", {"tp": 4}),  # two ranks share a group
    ("mamba2", "plain", "full", {"tp": 4}),
    ("mamba2", "plain", "selective", {}),
    ("mamba2", "plain", "none", {"cp": 2}),
    ("mamba2", "plain", "selective", {"cp": 4}),
    ("mamba2", "sequence", "full", {"cp": 2, "tp": 2}),
    ("mamba2-groups", "plain", "none", {"tp": 4}),
    ("mamba2-groups", "plain", "none", {"cp": 4}),
    ("mamba2-one-group", "sequence", "none", {"tp": 4}),
    ("mamba2-one-group", "plain", "selective", {"cp": 2, "tp": 2}),
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
    same_as_one(gradients_fp64, "mamba2", how, axes, 1e-11)


@pytest.mark.parametrize("axes", [{"tp": 4}, {"cp": 2}], ids=str)
def test_compiled_layers_have_the_same_gradients(axes: dict[str, int]) -> None:
    same_as_one(gradients_fp64, "mamba2", ("plain", "ring", "none", True), axes, 1e-11)


def test_a_mixer_computes_the_formula_of_the_paper() -> None:
    mixer = stack_of(MAMBA2, separate_documents=False).get_submodule("layers.0.mamba2")
    own = dict(mixer.named_parameters())
    u = torch.randn(7, 24, dtype=torch.float64)
    made = F.linear(u, own["in_proj.weight"], own["in_proj.bias"])
    z, convolved, steps = made.split((32, 32 + 2 * 12, 8), -1)
    row = F.pad(convolved.mT[None], (3, 0))
    convolved = F.silu(F.conv1d(row, own["conv.weight"], own["conv.bias"], groups=56)[0].mT)
    x, b, c = convolved.split((32, 12, 12), -1)
    x, b, c = x.view(7, 8, 4), b.view(7, 2, 6), c.view(7, 2, 6)
    d = F.softplus(steps + own["dt_bias"]).clamp(0.01, 0.9)
    state, outs = torch.zeros(8, 4, 6, dtype=torch.float64), []
    for t in range(7):
        state = torch.exp(-d[t] * own["A_log"].exp())[:, None, None] * state
        wide = b[t].repeat_interleave(4, 0)[:, None]
        state = state + (d[t, :, None] * x[t])[..., None] * wide
        outs.append(
            (state * c[t].repeat_interleave(4, 0)[:, None]).sum(-1) + own["D"][:, None] * x[t]
        )
    gated = torch.stack(outs).flatten(1) * F.silu(z)
    normed = F.rms_norm(gated.view(7, 2, 16), (16,), eps=MAMBA2.eps).flatten(1)
    want = F.linear(normed * own["norm.weight"], own["out_proj.weight"], own["out_proj.bias"])
    got = mixer(u, Context(torch.arange(7)[None]))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_nothing_passes_from_one_document_to_another() -> None:
    documents_are_apart(stack_of(MAMBA2))


def test_512_tokens_one_by_one_are_the_parallel_form() -> None:
    one_by_one_as_in_parallel(stack_of(MAMBA2))


def test_constants_are_fp32_in_a_bf16_model_and_begin_by_head() -> None:
    stack = LayerStack(build_decoder(recurrent(MAMBA2), replace(ONE, dtype=torch.bfloat16)))
    wide = {"A_log", "D", "dt_bias"}
    own = {n.split("mamba2.")[1]: p for n, p in stack.named_parameters() if "mamba2." in n}
    assert {name for name, p in own.items() if p.dtype == torch.float32} == wide
    layouts = parameter_layouts(stack, {"tp": 1})
    roles = {n.split("mamba2.")[1]: each.role for n, each in layouts.items() if "mamba2." in n}
    assert {name for name, role in roles.items() if role == "state"} == wide
    values = dict(stack_of(MAMBA2).named_parameters())
    log = torch.arange(1, 9, dtype=torch.float32).log()
    assert torch.equal(values["layers.2.mamba2.A_log"].float(), log)
    steps = F.softplus(values["layers.2.mamba2.dt_bias"])
    assert steps.min() >= 0.001 - 1e-6 and steps.max() <= 0.1 and steps.std() > 0


def test_the_norm_is_over_groups_of_gated_features() -> None:
    build = Build(Axis.solo("tp"), device=None, dtype=torch.float64)
    norm = GatedGroupNorm(12, 3, 1e-3, build)
    norm.weight.data.normal_()
    y, z = torch.randn(2, 5, 12, dtype=torch.float64).unbind()
    parts = [F.rms_norm(v, (4,), eps=1e-3) for v in (y * F.silu(z)).split(4, -1)]
    want = torch.cat(parts, -1) * norm.weight
    torch.testing.assert_close(norm(y, z, norm.means(y, z)), want, rtol=1e-12, atol=1e-12)


def test_it_is_measured_on_meta() -> None:
    block = BlockSpec(mixer=MAMBA2, feed_forward=None)
    kept = [kept_bytes(block, 24, MetaMicroBatch(2, size, recompute="none")) for size in (256, 512)]
    assert kept[1] <= 2 * kept[0]
    assert kept_bytes(block, 24, MetaMicroBatch(2, 512, recompute="selective")) < kept[1]
    sent = sent_bytes(block, 24, MetaMicroBatch(2, 16, tp=4), cut=Cut(64, 4, Layout()))
    channels, state = 2 * 4 + 2 * 6, 2 * (4 * 6 + 1)  # two heads and one group
    assert sent["cp"] == 2 * 2 * 2 * 3 * (3 * channels + state) * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "cannot split 8 heads over 3 tp ranks: choose a tensor-parallel size that divides"),
        ({"heads": 9, "groups": 2}, "cannot split 2 groups over 3 tp ranks: n_groups and the"),
    ],
)
def test_sizes_that_do_not_divide_are_named(changes: dict[str, int], message: str) -> None:
    axis = Axis("tp", 0, (0, 1, 2), backend="nccl")
    with pytest.raises(ValueError, match=message):
        build_decoder(recurrent(replace(MAMBA2, **changes)), Build(axis))
