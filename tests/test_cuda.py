"""The whole training over NCCL: the same numbers on every layout of GPUs, near those of a CPU."""

from __future__ import annotations

from pathlib import Path

import parity
import pytest
import torch
from parity import Layout, Trace

from kenotron_dist import spawn

pytestmark = pytest.mark.skipif(not torch.accelerator.is_available(), reason="no GPU here")
STEPS = 6
LAYOUT_BOUND = 1e-4
"""Largest relative deviation from one GPU. A product of another shape may take another kernel, that
adds in another order, and AdamW's first updates divide small gradients by their own size."""
DEVICE_BOUND = 5e-4
"""The same from a CPU, where every kernel is another one."""
LAYOUTS = [
    Layout(pp=2),
    Layout(pp=2, engine="zb-v", tied=True),
    Layout(dp=2),
    Layout(dp=2, zero=0),
    Layout(tp=2, tied=True),
    Layout(tp=2, sequence_parallel=True, overlap=True),
    Layout(pp=2, dp=2, tp=2, tied=True, sequence_parallel=True),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bool, Trace]]:
    folder = tmp_path_factory.mktemp("cuda")
    parity.write_text(folder)
    return folder, {tied: run(Layout(tied=tied), folder) for tied in (False, True)}


def run(layout: Layout, folder: Path, device: str = "cuda") -> Trace:
    config = parity.configure(layout, folder, STEPS)
    sizes = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}
    traces = spawn(parity.trace, config, **sizes, device=device, share_gpus=True)
    assert all(trace == traces[0] for trace in traces), "ranks report different numbers"
    return traces[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_trains_as_one_gpu(layout: Layout, reference) -> None:
    folder, one = reference
    got, want = run(layout, folder), one[layout.tied]
    losses = parity.deviation(got.losses, want.losses)
    norms = parity.deviation(got.norms, want.norms)
    print(f"\n{layout!s:34} loss {losses:.1e} norm {norms:.1e}", end="")
    assert losses <= LAYOUT_BOUND and norms <= LAYOUT_BOUND


def test_a_gpu_trains_as_a_cpu(reference) -> None:
    folder, one = reference
    cpu = run(Layout(), folder, "cpu")
    assert parity.deviation(one[False].losses, cpu.losses) <= DEVICE_BOUND
    assert parity.deviation(one[False].norms, cpu.norms) <= DEVICE_BOUND
