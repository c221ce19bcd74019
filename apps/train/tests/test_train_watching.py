"""Figures of steps, the table of speeds, profiles and the progress bar."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

import kenotron_ckpt.saving
from kenotron_command import short
from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_data import Batch
from kenotron_dist import Mesh, spawn
from kenotron_engine import StepResult, global_counts
from kenotron_train.assemble import data_plan, plan_of
from kenotron_train.config_file import load_config
from kenotron_train.log import speed_table
from kenotron_train.log.figures import Meter, StepFigures, UsedMemory
from kenotron_train.log.stopwatch import StepTimes, Stopwatch
from kenotron_train.run.loop import train


def config_of(folder: Path, **changes: object) -> Config:
    return load_config(DEFAULT_CONFIG, runs.arguments(folder, **changes)[1::2])


def meter_of(config: Config) -> Meter:
    ranks, device = config.world_size, torch.device("cpu")
    return Meter(plan_of(config), data_plan(config), ranks, device)


def figures_of(tokens: int, seconds: float, **changes: object) -> StepFigures:
    given = {
        "step": 1,
        "result": StepResult(2.5, 1.0, 1e-3),
        "times": StepTimes(seconds, 0.125, 0.25, 0.0625),
        "tokens": tokens,
        "samples": 4,
        "consumed_tokens": 128,
        "consumed_samples": 4,
        "memory": UsedMemory(1.5),
    }
    return StepFigures(**(given | changes))


def test_speeds_are_those_of_a_calculation_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden 32, feed-forward 48, 4 heads and 2 for keys of 8 features, 257 tokens, 2 layers."""
    monkeypatch.setenv("KENOTRON_PEAK_TFLOPS", "0.001")
    given = {"model__dtype": "bfloat16", "model__model_config__num_attention_heads": 4}
    config = config_of(tmp_path, **given, parallelism__tp=2)
    meter = meter_of(config)
    products = 32 * (4 + 2 * 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48
    per_token = 2 * 2 * products + 2 * 32 * 257
    tokens, rows, sequence = 4 * 32, 4, 32
    full = 3 * (tokens * per_token + 2 * 4 * rows * 4 * 8 * sequence**2)
    seen = 3 * (tokens * per_token + 2 * 4 * rows * 4 * 8 * (sequence * (sequence + 1) // 2))
    step = figures_of(96, 0.5)  # a quarter of the 128 is padding
    found = meter.metrics(step)
    assert found["tokens_per_sec"] == 192.0
    assert found["tokens_per_sec_per_gpu"] == 96.0
    assert found["model_tflops_per_gpu"] == pytest.approx(full * 0.75 / 0.5 / 2 / 1e12)
    assert found["model_tflops_per_gpu_causal"] == pytest.approx(seen * 0.75 / 0.5 / 2 / 1e12)
    assert found["mfu"] == pytest.approx(full * 0.75 / 0.5 / 2 / 1e9)
    assert found["mfu_causal"] == pytest.approx(seen * 0.75 / 0.5 / 2 / 1e9)
    times = {
        "step_time_s": 0.5,
        "data_wait_s": 0.125,
        "save_blocked_s": 0.25,
        "save_after_s": 0.0625,
    }
    assert found | times == found
    assert found["memory_gb"] == 1.5 and "memory_device_gb" not in found


def test_without_a_known_peak_there_is_no_mfu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KENOTRON_PEAK_TFLOPS", raising=False)
    step = figures_of(128, 0.5)
    bf16 = config_of(tmp_path, model__dtype="bfloat16")
    assert meter_of(bf16).metrics(step)["mfu"] is None
    monkeypatch.setenv("KENOTRON_PEAK_TFLOPS", "1")
    assert meter_of(config_of(tmp_path)).metrics(step)["mfu"] is None  # the peak is of bf16
    monkeypatch.setenv("KENOTRON_PEAK_TFLOPS", "fast")
    with pytest.raises(ValueError, match="KENOTRON_PEAK_TFLOPS=fast: it must be a positive"):
        meter_of(bf16)


def padded(mesh: Mesh) -> int:
    """Rank 0 has a padded row of two, rank 1 two tokens of padding in one row."""
    zeros = torch.zeros(1, 2, 8, dtype=torch.int64)
    documents = zeros.clone()
    samples = torch.tensor([[0, 1]])
    if mesh.coords["dp"] == 0:
        samples[0, 1] = -1
    else:
        documents[0, 1, 6:] = -1
    batch = Batch(zeros, zeros, zeros, samples, None, documents)
    return int(global_counts(batch, mesh)[1])


def test_padding_is_not_counted() -> None:
    assert spawn(padded, dp=2, tp=2) == [8 + 14] * 4


def test_a_stopwatch_keeps_waits_and_saves_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 11.0, 13.0, 14.0, 14.5, 18.0, 20.0, 27.0, 30.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    watch = Stopwatch()
    watch.start()
    with watch.waiting():
        pass
    with watch.saving():
        pass
    watch.stop()
    with watch.saving():  # after the step: no part of its time
        pass
    assert watch.times == StepTimes(8.0, data_wait=2.0, save_blocked=7.5, save_after=7.0)
    watch.start()
    assert watch.times.save_blocked == 0.0


def test_communication_counts_inside_the_step_alone() -> None:
    waited = iter([3.0, 7.5])
    watch = Stopwatch(lambda: next(waited))
    watch.start()
    watch.stop()
    assert watch.times.communication == 4.5
    unknown = Stopwatch()
    unknown.start()
    unknown.stop()
    assert unknown.times.communication is None


def test_a_run_writes_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = kenotron_ckpt.saving.write_part

    def slow(*arguments: Any) -> Any:  # by more than a busy machine delays the other steps
        time.sleep(0.2)
        return write(*arguments)

    monkeypatch.setattr(kenotron_ckpt.saving, "write_part", slow)
    train(Mesh.connect(), config_of(tmp_path, checkpoints__checkpointing_engine="torch"))
    steps = runs.metrics(tmp_path)
    assert [s["consumed_samples"] for s in steps] == [4, 8, 12, 16, 20, 24]
    assert all(s["tokens"] == 128 for s in steps)
    assert all(0 <= s["data_wait_s"] < s["step_time_s"] for s in steps)
    assert all(s["communication_s"] == 0 for s in steps)
    assert all(s["tokens_per_sec"] == s["tokens"] / s["step_time_s"] for s in steps)
    saved = [s["save_blocked_s"] > 0.2 for s in steps]
    assert saved == [False, False, True, False, False, True]


def test_the_table_has_nanotrons_columns_and_a_line_a_run(tmp_path: Path) -> None:
    path = tmp_path / "new/speeds.csv"
    config = config_of(tmp_path, general__benchmark_csv_path=path)
    train(Mesh.connect(), config)
    again = tmp_path / "again"
    again.mkdir()
    spawn(train, config_of(again, general__benchmark_csv_path=path, parallelism__tp=2), tp=2)
    with path.open() as file:
        one, two = csv.DictReader(file)
    head = "job_id,name,nodes,seq_len,mbs,batch_accum,gbs,mTFLOPs,hTFLOPs,tok/s/gpu,Mem Alloc (GB)"
    assert ",".join(one).startswith(head)
    assert (one["nodes"], one["seq_len"], one["gbs"], one["tp"], two["tp"]) == (
        "1", "32", "4", "1", "2",
    )  # fmt: skip
    assert (one["Total Params"], one["dtype"], one["hidden_act"]) == ("32K", "float32", "silu")
    steps = runs.metrics(again)[1:]
    middle = statistics.median(s["tokens_per_sec_per_gpu"] for s in steps)
    assert f"{middle:.2f}" == two["tok/s/gpu"]


def test_nanotron_benchmark_ends_the_run_after_four_steps(tmp_path: Path) -> None:
    path = tmp_path / "speeds.csv"
    flags = runs.arguments(tmp_path, general__benchmark_csv_path=path)
    done = subprocess.run(
        [sys.executable, str(runs.APP), *flags], env=os.environ | {"NANOTRON_BENCHMARK": "1"},
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert [s["step"] for s in runs.metrics(tmp_path)] == [1, 2, 3, 4]
    assert "Benchmark: job_id: " in done.stdout
    assert len(path.read_text().splitlines()) == 2


def add_many(path: str, name: str) -> None:
    row = dict.fromkeys(speed_table.COLUMNS, name * 50)
    for _ in range(50):
        speed_table.add_row(path, row)


def test_lines_of_runs_at_once_are_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "speeds.csv")
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=add_many, args=(path, name)) for name in "ab"]
    for each in both:
        each.start()
    for each in both:
        each.join()
    head, *rows = csv.reader(Path(path).read_text().splitlines())
    assert tuple(head) == speed_table.COLUMNS
    assert len(rows) == 100
    assert {tuple(set(row)) for row in rows} == {("a" * 50,), ("b" * 50,)}


def test_another_table_is_refused_before_the_training(tmp_path: Path) -> None:
    path = tmp_path / "speeds.csv"
    path.write_text("when,speed\n1,2\n")
    config = config_of(tmp_path, general__benchmark_csv_path=path)
    with pytest.raises(ValueError, match=r"benchmark_csv_path: .* has other columns \(when, speed"):
        train(Mesh.connect(), config)
    with pytest.raises(ValueError, match="is a folder; give a file's path"):
        train(Mesh.connect(), config_of(tmp_path, general__benchmark_csv_path=tmp_path))
    assert path.read_text() == "when,speed\n1,2\n"


def test_every_rank_writes_a_trace_of_each_round(tmp_path: Path) -> None:
    section = (
        f"{{profiler_export_path: {tmp_path}/traces, skip_first: 1, wait: 0, warmup: 1, active: 1, "
        "repeat: 2, record_shapes: true, profile_memory: true, with_stack: false}"
    )
    done = runs.train(tmp_path, *runs.arguments(tmp_path, profiler=section, parallelism__tp=2))
    assert done.returncode == 0, done.stderr
    found = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert found == [f"rank{r}.step{n}.pt.trace.json" for r in (0, 1) for n in (3, 5)]
    for name in found:
        events = json.loads((tmp_path / "traces" / name).read_text())["traceEvents"]
        products = [e for e in events if e.get("name") == "aten::mm"]
        assert len(products) > 10
        assert all("Input Dims" in e["args"] for e in products)
        steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep")}
        assert len(steps) == 1
    assert done.stdout.count("there are no memory snapshots on cpu, they need CUDA") == 1
    assert "Profile of the steps up to 5 in" in done.stdout


def test_memory_of_a_process_is_what_the_system_says() -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("there is no /proc")
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024 / 1e9
    assert UsedMemory.of_step(torch.device("cpu")).peak == pytest.approx(peak, rel=0.05)


class Device:
    """Stands in for an accelerator of 80 GB, 20 of them taken by others, and torch's allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0.0
        monkeypatch.setattr(torch, "get_device_module", lambda device: self)
        for name in ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))

    def allocate(self, gb: float) -> None:
        self.now += gb * 1e9
        self.most = max(self.most, self.now)

    def max_memory_allocated(self, device: torch.device) -> float:
        return self.most

    def max_memory_reserved(self, device: torch.device) -> float:
        return 2 * self.most

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.most = self.now

    def mem_get_info(self, device: torch.device) -> tuple[float, float]:
        return 60e9 - 2 * self.now, 80e9


def test_memory_of_a_step_is_its_own_and_that_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, cuda = Device(monkeypatch), torch.device("cuda", 1)
    device.allocate(3)
    device.allocate(7)
    device.allocate(-6)
    assert UsedMemory.of_step(cuda) == UsedMemory(10, 20, 28)
    device.allocate(1)
    device.allocate(-1)
    second = UsedMemory.of_step(cuda)
    assert second == UsedMemory(5, 10, 28)  # the peak of the step before is not in it
    step = figures_of(96, 0.5, memory=second)
    found = meter_of(config_of(tmp_path)).metrics(step)
    names = ("memory_gb", "memory_reserved_gb", "memory_device_gb")
    assert [found[name] for name in names] == [5, 10, 28]
    assert short(999.6) == "1e+03"


def test_a_file_gets_plain_lines(tmp_path: Path) -> None:
    done = runs.train(tmp_path, *runs.arguments(tmp_path, tokens__train_steps=2))
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    assert "iteration: 2 / 2 | " in done.stdout
