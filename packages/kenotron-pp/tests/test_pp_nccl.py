"""Pipelines over NCCL: the bits of one process, and failures that end on every rank.

Without a GPU they run over the fake NCCL, on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from pp_models import decoder, needs_gpu
from test_pp_failure import fail
from test_pp_schedules_agree import compare, structures

from kenotron_dist import Mesh
from kenotron_dist.testing import on_nccl
from kenotron_pp import (
    Pipeline,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)

ALL = [gpipe, one_f_one_b, interleaved(2), zero_bubble_h1, zero_bubble_v]


@pytest.mark.parametrize("pp", [2, 3])
def test_every_schedule_equals_one_process(pp: int) -> None:
    for found in on_nccl(compare, ALL, [1, 4], pp=pp):
        assert not found


def test_tuples_and_dicts_travel() -> None:
    for found in on_nccl(structures, pp=2):
        assert not found


def one_group(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r'over \w*nccl .* pass pairs=mesh.pairs\("pp"\)'):
        Pipeline(decoder(3), mesh["pp"])
    assert Pipeline(decoder(3), mesh["pp"], pairs=mesh.pairs("pp")).device == mesh.device


def test_one_group_for_both_directions_is_an_error() -> None:
    on_nccl(one_group, pp=2)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_failure_ends_the_step_on_all_ranks(phase: str) -> None:
    ranks = on_nccl(fail, one_f_one_b, phase, 1, pp=2)
    for told, seconds, broken in ranks:
        assert "KeyError: 'no such expert'" in told and "rank 1, stage 1, micro-batch 2" in told
        assert broken == ranks[1][2]
        # Ranks that share a GPU wait for one another's kernels: no time can be promised there.
        assert torch.accelerator.is_available() or seconds < 5


def live(mesh: Mesh) -> tuple[int, int]:
    """Bytes of activations that 8 micro-batches need at most, in 1F1B and in AFAB."""
    found = []
    for schedule in (one_f_one_b, gpipe):
        layers = [torch.nn.Linear(512, 512) for _ in range(4)]
        pipeline = Pipeline(layers, mesh["pp"], schedule, pairs=mesh.pairs("pp"))
        inputs = [torch.randn(1024, 512) for _ in range(8)]
        for _ in range(2):
            before = torch.accelerator.memory_allocated()
            torch.accelerator.reset_peak_memory_stats()
            pipeline.run(inputs, lambda y, m: y.square().mean())
            peak = torch.accelerator.max_memory_allocated() - before
        found.append(peak)
    return found[0], found[1]


@needs_gpu
def test_activations_are_freed_as_soon_as_the_schedule_allows() -> None:
    first, last = on_nccl(live, pp=2)
    microbatch = 4 * 1024 * 512 * 4  # a linear saves its input
    assert first[0] <= 4 * microbatch < 7 * microbatch <= first[1]
    assert last[0] <= 3 * microbatch < 7 * microbatch <= last[1]
