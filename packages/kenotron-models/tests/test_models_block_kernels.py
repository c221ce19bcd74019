"""Kernels of a block and their bytes: on device meta those that a real block starts on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_models_memory import FAMILIES, ROWS, SEQUENCE

from kenotron_dist import Axis
from kenotron_models import Build, Context
from kenotron_models.block_costs import Kernels, KernelWork, MetaMicroBatch, block_kernels
from kenotron_models.layers import Block
from kenotron_tp import TPMode

LEAST = {"mistral": 0.9, "olmoe": 0.8, "mixtral": 0.8, "mamba": 0.55}
"""Share of a CPU's kernels and bytes: it has more for a mask of a window, for counts of an
exchange, and for the parts of a scan. Those of others are equal."""


def real(name: str, dtype: torch.dtype) -> tuple[Kernels, Kernels]:
    spec = FAMILIES[name].decoder
    layer = Block(
        spec.blocks[0], spec.hidden_size, Build(Axis.solo("tp"), device="cpu", dtype=dtype)
    )
    places = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
    context = Context(places, torch.arange(ROWS), dropout_key=0)
    wide = torch.float32 if spec.residual_in_fp32 else dtype
    x = torch.randn(ROWS * SEQUENCE, spec.hidden_size, dtype=wide, requires_grad=True)
    with Kernels() as forward:
        y = layer(x, context)
    given = torch.empty_like(y)
    with Kernels() as backward:
        torch.autograd.backward(y, given)
    return forward, backward


def counted(
    name: str,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[KernelWork, ...]:
    spec = FAMILIES[name].decoder
    wide = torch.float32 if spec.residual_in_fp32 else None
    batch = MetaMicroBatch(ROWS, SEQUENCE, dtype=dtype, residual=wide, **options)
    return block_kernels(spec.blocks[0], spec.hidden_size, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_on_meta_a_block_starts_the_kernels_of_a_real_one(name: str, dtype: torch.dtype) -> None:
    for meta, cpu in zip(counted(name, dtype), real(name, dtype), strict=True):
        if (least := LEAST.get(name)) is None:  # attention is one kernel more: a stand-in has none
            assert meta.nbytes == cpu.nbytes and cpu.kernels - meta.kernels in (0, 1)
        else:
            assert least * cpu.nbytes <= meta.nbytes <= 1.05 * cpu.nbytes
            assert least * cpu.kernels <= meta.kernels <= 1.05 * cpu.kernels


def test_what_is_computed_again_are_the_kernels_of_the_forward() -> None:
    (forward, backward), (_, again) = (
        counted("llama"), counted("llama", recompute="full"),
    )  # fmt: skip
    assert again.nbytes - backward.nbytes == pytest.approx(forward.nbytes, rel=0.15)
    selective = counted("llama", recompute="selective")[1]
    assert backward.kernels < selective.kernels and backward.nbytes < selective.nbytes


def test_fused_norms_are_fewer_kernels_and_tp_shares_bytes_and_calls() -> None:
    plain, fused = counted("llama"), counted("llama", fused_norms=True)
    cut = counted("llama", tp=2, mode=TPMode(sequence_parallel=True))
    for one, less, share in zip(plain, fused, cut, strict=True):
        assert less.kernels < one.kernels and less.nbytes < one.nbytes and not one.calls
        assert share.nbytes < 0.7 * one.nbytes and share.calls == {"tp": 4}
