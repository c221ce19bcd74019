"""Kernels and bytes of a training step on an accelerator: no phase needs more than is frozen."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__("bench_kernels")
    for name in ("bench_kernels", "kernel_cases"):  # the counter's operators are made once
        sys.modules.pop(name, None)


@pytest.fixture
def frozen(bench):
    return json.loads(bench.FROZEN.read_text())


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.2-1b"])
def test_no_phase_needs_more_kernels_or_bytes_than_frozen(bench, frozen, model):
    again = "run apps/train/benchmarks/bench_kernels.py --freeze"
    found = {name: list(cost) for name, cost in bench.costs(bench.MODELS[model]).items()}
    assert found.keys() == frozen[model].keys(), f"the phases differ: {again}"
    for phase, cost in found.items():
        for what, now, before in zip(("kernels", "bytes"), cost, frozen[model][phase], strict=True):
            assert now <= before, f"{model}, {phase}: {now} {what}, frozen are {before}"
            assert now == before, f"{model}, {phase}: {now} {what} instead of {before}: {again}"


def test_the_file_has_the_text_that_freezing_writes(bench):
    assert bench.FROZEN.read_text() == bench.frozen_text()


def test_the_table_has_a_legend_and_a_document_names_it(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py"])
    monkeypatch.setattr(bench, "MODELS", {"tiny": bench.MODELS["llama-3.2-1b"]})
    bench.main()
    printed = capsys.readouterr().out
    for column in ("kernels", "MB", "ms of copies", "taken"):
        assert f"\n{column} " in printed, column
    assert (
        "apps/train/benchmarks/bench_kernels.py" in (BENCHMARKS.parent / "docs/gpus.md").read_text()
    )


def test_bytes_are_those_that_are_read_and_written(bench):
    import torch
    from kernel_counter import counting

    x = torch.empty(8, 16, device="meta")  # 512 bytes
    ids = torch.empty(8, 1, dtype=torch.int64, device="meta")  # 64 bytes
    for run, kernels, nbytes in (
        (lambda: x + x, 1, 3 * 512),
        (lambda: x.add_(1), 1, 2 * 512),
        (lambda: x.zero_(), 1, 512),
        (lambda: torch.full_like(x, 3.0), 1, 512),
        (lambda: x + x[:1].expand(8, 16), 1, 2 * 512 + 64),  # what is expanded is read once
        (lambda: torch.mul(x, 2, out=torch.empty_like(x)), 1, 2 * 512),
        (lambda: x.t().view(-1, 2, 8), 0, 0),
        (lambda: x.gather(1, ids), 1, 64 + 32 + 48),
        (lambda: torch._foreach_mul_([x, x.clone()], 2.0), 2, 4 * 512 + 2 * 512),
        (lambda: torch.nn.functional.rms_norm(x, (16,), eps=1e-5), 1, 2 * 512 + 32),
    ):
        with counting() as counter:
            run()
        assert tuple(counter.cost) == (kernels, nbytes)
