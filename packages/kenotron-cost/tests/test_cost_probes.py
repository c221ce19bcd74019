"""Rates that probes make of seconds: here a call takes a second for each operation, or byte."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kenotron_cost import probes
from kenotron_dist import Mesh
from kenotron_dist.diagnosis import record


def operations(mesh, seconds, work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def test_products_have_the_operations_that_torch_counts(monkeypatch):
    monkeypatch.setattr(probes, "_median", operations)
    found = probes.products(Mesh.connect(), torch.float32, 8, 6, 1.0)
    assert found == dict.fromkeys(("6 x 8 x 8", "6 x 8 x 32", "6 x 32 x 8"), (1.0, 1.0))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_links_have_the_bytes_that_are_recorded(ranks, monkeypatch):
    def sent(mesh, seconds, work):
        with record(mesh) as recorder:
            work()
        return sum(recorder.bytes_per_axis().values())

    monkeypatch.setattr(probes, "_together", sent)
    with closing(Mesh.connect(dp=ranks, backend="fake")) as mesh:
        rate, latency = probes.links(mesh, 1.0)
    assert rate == pytest.approx(1.0, rel=1e-4)
    assert latency == pytest.approx(4 * (ranks - 1) * 4 / 3)  # of a number for each rank
