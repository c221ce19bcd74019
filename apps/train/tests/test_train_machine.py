"""What this machine cannot hold or start is said before there are ranks, and in ``--check``."""

from __future__ import annotations

import re
import time
from pathlib import Path
from unittest import mock

import pytest
import runs
import torch
from own_runs import configure

from kenotron_config import Config
from kenotron_cost import host as machine
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.host import MachineMemory, check_machine, host_memory, machine_cautions
from kenotron_cost.state_bytes import state_of_rank
from kenotron_train.cli import main
from kenotron_train.run.preview import cannot_run, preview

LARGE = {"model.model_config.hidden_size": 5 * 10**5}
NEEDS = (
    r"model.model_config: parameters, gradients and the optimizer's state of .* need .* GB, but "
    r"this host has .* GB, of which .* are free; make the model smaller, or spread it over more"
)


def check(config: Config) -> None:
    check_machine(cost_plan(config), config.data_stages)


def linux(root: Path, limit: str | None = None) -> Path:
    """Linux's files of a host with 100 KiB of memory and 10 of swap."""
    (root / "proc").mkdir()
    text = "MemTotal: 100 kB\nMemAvailable: 60 kB\nSwapTotal: 10 kB\nSwapFree: 5 kB\nHugePages: 0\n"
    (root / "proc/meminfo").write_text(text)
    if limit is not None:
        group = root / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(limit)
        (group / "memory.current").write_text("10240\n")
    return root


def test_memory_is_that_of_the_host_within_its_control_group(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None
    for name, limit, free, total in (
        ("no group", None, 65, 110),
        ("no limit", "max\n", 65, 110),
        ("limit", "40960\n", 30, 40),
    ):
        (tmp_path / name).mkdir()
        found = host_memory(linux(tmp_path / name, limit))
        assert found == MachineMemory(free * 1024.0, total * 1024.0)


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    config = configure(tmp_path, None, LARGE)
    with pytest.raises(ValueError, match=NEEDS):
        check(config)
    assert re.match(NEEDS, *machine_cautions(cost_plan(config)))
    assert re.search(f"\nWarning: {NEEDS}", preview(config))
    assert cannot_run(config) == []  # another machine may be larger
    check(configure(tmp_path, None))
    assert machine_cautions(cost_plan(configure(tmp_path, None))) == []


def test_what_may_not_fit_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(tmp_path, None)
    monkeypatch.setattr(machine, "host_memory", lambda: MachineMemory(10.0, 1e12))
    check(config)
    (line,) = machine_cautions(cost_plan(config))
    assert "has 1e+03 GB, of which 1e-08 are free" in line
    monkeypatch.setattr(machine, "host_memory", lambda: None)
    check(configure(tmp_path, None, LARGE))


def test_ranks_that_share_a_core_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(tmp_path, None, {"parallelism.dp": 6})
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    (line,) = machine.host_cautions(cost_plan(config))
    assert line.startswith("parallelism: 6 ranks share the 2 cores of this host: ")
    monkeypatch.setattr(machine, "usable_cores", lambda: 6)
    assert machine.host_cautions(cost_plan(config)) == []


def test_on_gpus_it_is_their_memory_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = mock.Mock(mem_get_info=lambda _: (2.0, 3.0))
    monkeypatch.setattr(torch, "get_device_module", lambda _: there)
    monkeypatch.setattr(machine, "visible_gpus", lambda: 2)
    monkeypatch.setattr(machine, "host_memory", lambda: MachineMemory(1.0, 1.0))
    config = configure(tmp_path, None, {"parallelism.dp": 2})
    check(config)
    assert machine.host_cautions(cost_plan(config)) == []
    assert (
        "but the GPU here has 3e-09 GB, of which 2e-09 are free"
        in machine_cautions(cost_plan(config))[0]
    )
    with pytest.raises(ValueError, match="this host has"):
        check(configure(tmp_path, None, {"general.device": "cpu"}))


def test_what_gpus_offload_needs_room_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: 2)
    given = {"parallelism.dp": 2, "optimizer.zero_stage": 1, "model.dtype": "bfloat16"}
    plain = configure(tmp_path, None, given)
    config = configure(tmp_path, None, given | {"optimizer.offload": True})
    total, device, host = (
        state_of_rank(cost_plan(config), place) for place in ("all", "device", "host")
    )
    assert (
        device + host == total == state_of_rank(cost_plan(plain))
        and state_of_rank(cost_plan(plain), "host") == 0
    )
    assert host == device  # 12 bytes over dp 2, and 2 of parameters with 4 of gradients
    there = mock.Mock(mem_get_info=lambda _: (device, device))
    monkeypatch.setattr(torch, "get_device_module", lambda _: there)
    words = (
        r"^optimizer.offload: true was given; masters and optimizer state of the 2 ranks of this "
        r"host need .* GB of its memory, but it has .* GB, of which .* are free; set it to false, "
        r"or spread the model over more hosts"
    )
    monkeypatch.setattr(machine, "host_memory", lambda: MachineMemory(1.0, 2 * host - 1))
    check(plain)
    with pytest.raises(ValueError, match=words):
        check(config)
    monkeypatch.setattr(machine, "host_memory", lambda: MachineMemory(2 * host - 1, 2 * host))
    check(config)
    (line,) = machine_cautions(cost_plan(config))
    assert re.match(words, line)
    (line,) = machine_cautions(cost_plan(plain))
    assert "but the GPU here has" in line
    monkeypatch.setattr(machine, "host_memory", lambda: MachineMemory(2 * host, 2 * host))
    assert machine_cautions(cost_plan(config)) == []
    assert f"pp rank 0 has {host / 1e9:.3g} of them in host memory (offload)" in preview(config)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("parallelism__dp", "pp 1 x dp 1000 x tp 1 are 1000 ranks on this host, which has "),
        (
            "data_stages__0__data__num_loading_workers",
            "data_stages.0.data.num_loading_workers: 1000 was given; this host has 2 cores",
        ),
    ],
)
def test_ranks_and_workers_beyond_the_machine_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, words: str
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    config = configure(tmp_path, None, {key.replace("__", "."): 1000})
    with pytest.raises(ValueError, match="takes at most 64") as caught:
        check(config)
    assert words in str(caught.value)
    monkeypatch.setattr(machine, "usable_cores", lambda: 32)
    check(config)


def test_the_program_says_it_before_ranks_are_started(tmp_path: Path) -> None:
    begun = time.monotonic()
    for flags in (
        {"parallelism__dp": 10**5},
        {"data_stages__0__data__num_loading_workers": 10**6},
        {"model__model_config__hidden_size": 10**9},
    ):
        done = runs.train(tmp_path, *runs.arguments(tmp_path, **flags))
        assert done.returncode == 1
        assert done.stderr.startswith("error: ") and "this host" in done.stderr
        assert "rank 0" not in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.model_config.hidden_size", 10**12, "a tensor of this model is too large"),
        ("model.model_config.hidden_size", 10**9, "no machine has more than 6.4e+04; make the"),
        ("general.benchmark_csv_path", __file__, "general.benchmark_csv_path"),
    ],
)
def test_a_check_of_what_cannot_be_run_fails(
    tmp_path: Path, key: str, value: object, words: str
) -> None:
    done = runs.train(tmp_path, "--check", *runs.arguments(tmp_path), "--set", f"{key}={value}")
    assert done.returncode == 1
    assert "Cannot be run: " in done.stdout and words in done.stdout
    assert runs.train(tmp_path, "--check", *runs.arguments(tmp_path)).returncode == 0


@pytest.mark.parametrize(
    ("key", "value", "gpus", "words"),
    [
        (
            "general.device",
            "cuda",
            0,
            r"general.device: cuda was given; .* \(torch 2.*\); check it",
        ),
        (
            "model.cuda_graph",
            "true",
            0,
            "model.cuda_graph: true was given; no GPU can be used",
        ),
        ("general.device", "cuda", 1, ""),  # of a larger machine
        ("model.cuda_graph", "true", 1, ""),
    ],
)
def test_a_check_for_gpus_where_there_are_none_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    key: str,
    value: str,
    gpus: int,
    words: str,
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(machine, "gpu_problem", lambda: "torch 2 is built without CUDA")
    monkeypatch.setattr(machine, "device_memory", lambda _: None)
    flags = ["--check", *runs.arguments(tmp_path), "--set", f"{key}={value}"]
    assert main(flags) == (1 if words else 0)
    said = capsys.readouterr().out
    assert "GB" in said  # layout and memory are shown all the same
    if words:
        assert re.search("Cannot be run: " + words, said)
    else:
        assert "Cannot be run" not in said


def test_a_check_of_a_graph_on_cpus_fails_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: 8)
    changes = {"general.device": "cpu", "model.cuda_graph": True}
    config = configure(tmp_path, None, changes)
    given = config.general.device, config.model.cuda_graph
    (line,) = machine.without_gpus(given[0], cuda_graph=given[1])
    assert line.startswith("model.cuda_graph: true was given with general.device cpu; set it to")
