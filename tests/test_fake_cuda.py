"""Layouts, architectures and modes take their GPU paths on tensors without values, without a GPU.

A tensor on the wrong device, a read of the device and a copy that blocks the host fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import bits_cases
import fake_cuda
import grid
import grid_run
import pytest
import torch
from bits_layouts import CASES
from fake_cuda import a_step
from fake_cuda_device import DEVICE, BlockingCopy, DeviceFault, HostRead, Machine, WrongDevice
from grid import CUT_LENGTH, Row
from host_reads import ELSEWHERE, IN_A_STEP
from test_shards_of_families import OPTIMIZER, configs

import kenotron_engine
from kenotron_config import Config
from kenotron_data import Batch
from kenotron_dist import Mesh
from kenotron_engine import ModelPlan, continue_texts, evaluate, training_step
from kenotron_models import Sampling, TransformersSpec, expert_layers
from kenotron_train.assemble import build_training

ROOT = Path(__file__).parent.parent
PARTS = 4
"""Of the architectures, of which a day has one."""
SMALL: Any = {"micro": 1, "layers": 2}
ROWS = {
    "zb-v, sp, documents": grid.HAND_PICKED[0],
    "interleaved, overlap, full": grid.HAND_PICKED[1],
    "zb-h1, dropout": grid.HAND_PICKED[5],
    "own sums, bf16": Row(sizes=(1, 2, 2), dtype="bf16", accumulate="own", zero=0, arch="qwen2"),
    "ZeRO 3, selective": Row(sizes=(1, 2, 2), zero=3, recompute="selective", arch="mistral"),
    "ZeRO 2, Muon": Row(sizes=(1, 2, 1), zero=2, dtype="bf16", extra="muon", tied=True),
    "MTP": Row(sizes=(2, 1, 2), extra="mtp", dtype="bf16", mode="sp"),
    "blocked, window": Row(arch="mistral", attention="blocked", documents="separate"),
    "ring": Row(cp=2, sequence=CUT_LENGTH, arch="qwen2", documents="separate", micro=1),
    "gather, bf16": Row(cp=2, way="gather", sequence=CUT_LENGTH, dtype="bf16", **SMALL),
    "Ulysses": Row(cp=2, way="ulysses", sequence=CUT_LENGTH, zero=2, **SMALL),
    "experts, ep 4, ZeRO 3": replace(grid.EXPERTS_BY_HAND[3], dtype="bf16", ep=4),
    "experts, fp32, limited": grid.EXPERTS_BY_HAND[4],
    "MLA, ep 2": Row(sizes=(1, 2, 1), ep=2, arch="deepseek", dtype="bf16", micro=2),
    "Mamba, cp": Row(cp=2, arch="mamba", documents="separate", sequence=CUT_LENGTH, **SMALL),
    "hybrid": Row(sizes=(1, 1, 2), mode="sp", arch="hybrid", dtype="bf16", micro=2),
}
REPRODUCIBLE = ("tp 2, delta rule", "cp 2, sinks", "dp 2, ep 2, capacity", "pp 2, tp 2, µP")


@pytest.fixture
def machine() -> Iterator[Machine]:
    with fake_cuda.fake_cuda() as found:
        yield found


def batch(micro: int, sequence: int, rows: int = 1) -> Batch:
    """Rows (M, B, S) of two documents each, on the host."""
    shape = micro, rows, sequence
    tokens = torch.arange(micro * rows * sequence).view(shape) % 251
    places = torch.cat([torch.arange(5), torch.arange(sequence - 5)])
    samples = torch.arange(micro * rows).view(shape[:2])
    positions = places.expand(shape).contiguous()
    return Batch(tokens, tokens, positions, samples, sources_MB=torch.zeros_like(samples))


def on_ends(work: Callable[[Mesh], object], **sizes: int) -> None:
    """Call ``work`` as the first and the last rank of a world without others, on the device."""
    ranks = sizes.get("pp", 1) * sizes.get("dp", 1) * sizes.get("cp", 1) * sizes.get("tp", 1)
    for rank in sorted({0, ranks - 1}):
        with closing(Mesh.connect(**sizes, backend="fake", rank=rank, device=DEVICE)) as mesh:
            work(mesh)


@contextmanager
def faultless(machine: Machine) -> Iterator[None]:
    """Around a step, of which a fault is a failure and not an error."""
    try:
        with a_step(machine):
            yield
    except DeviceFault as fault:
        raise AssertionError(f"{type(fault).__name__}: {fault}") from None


def step_of(config: Config, machine: Machine) -> Callable[[Mesh], None]:
    def work(mesh: Mesh) -> None:
        training = build_training(config, mesh)
        tokens = config.tokens
        given = batch(tokens.batch_accumulation_per_replica, tokens.sequence_length)
        with faultless(machine):
            result = training_step(training, given.to(mesh.device), 1)
        assert result.loss == 1.0 and not result.skipped  # what is read of a device is 1
        assert all(p.is_cuda for p in training.parameters().values())

    return work


@pytest.mark.by_turns(4)
@pytest.mark.parametrize("name", ROWS)
def test_a_layout_makes_a_step_on_the_device(name: str, tmp_path: Path, machine: Machine) -> None:
    row = ROWS[name]
    on_ends(step_of(grid_run.configure(row, tmp_path, "run", 1, None), machine), **row.axes)
    assert sum(machine.operators.values()) > 200
    expected = {"dist/src/kenotron_dist/weight_products.py"}
    if row.arch in ("deepseek", "qwen2_moe", "qwen2_moe_limited"):
        expected |= {"ep/src/kenotron_ep/exchange.py", "dist/src/kenotron_dist/fake_world.py"}
        if row.dtype == "fp32":
            expected.add("models/src/kenotron_models/stacked_linear.py")
    assert {line.partition(":")[0] for line in machine.reads} <= expected


@pytest.mark.by_turns(1)
@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_so_does_the_reproducible_mode(name: str, tmp_path: Path, machine: Machine) -> None:
    row, config = bits_cases.configure(CASES[name], tmp_path, "run", alone=False)
    on_ends(step_of(config, machine), **row.axes)


@pytest.mark.by_turns(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_so_does_every_architecture(part: int, machine: Machine) -> None:
    """A step over dp and tp (experts: ep, too), an evaluation of it, and three new tokens."""
    for name, config in list(configs().items())[part::PARTS]:
        spec = config.decoder
        sizes = {"dp": 2} if isinstance(spec, TransformersSpec) else {"dp": 2, "tp": 2}
        if expert_layers(spec):
            sizes["ep"] = 2
        plan = ModelPlan(spec=spec, draws=(0.1, "NUM_LAYERS"), dtype=torch.bfloat16)
        with closing(Mesh.connect(**sizes, backend="fake", device=DEVICE)) as mesh:
            training = kenotron_engine.build_training(plan, OPTIMIZER, mesh, 2)
            with faultless(machine):
                assert training_step(training, batch(2, 16).to(DEVICE), 1).loss == 1.0, name
            assert evaluate(training, [batch(1, 16)], ("text",)).loss == 1.0, name
            new = continue_texts(
                training, [[5, 6, 7], [8, 9]], window=16, max_new_tokens=3, batch_size=2,
                sampling=Sampling(temperature=0.5, top_k=5, repetition_penalty=1.2),
                ends=lambda text, token: False,
            )  # fmt: skip
            assert new[0] == [1, 1, 1], name


FAULTS: dict[str, tuple[Callable[[torch.Tensor], object], type[DeviceFault]]] = {
    "a mask on the host": (lambda x: x.masked_fill(torch.ones(3, 4).bool(), 0), WrongDevice),
    "positions on the host": (lambda x: x + torch.arange(4), WrongDevice),
    "a scalar on the host in a list": (
        lambda x: torch.stack([x[0, 0], torch.ones(())]),
        WrongDevice,
    ),
    "item": (lambda x: x.sum().item(), HostRead),
    "tolist": (lambda x: x.tolist(), HostRead),
    "float": (lambda x: float(x.sum()), HostRead),
    "bool": (lambda x: bool((x > 0).any()), HostRead),
    "cpu": (lambda x: x.cpu(), HostRead),
    "numpy": (lambda x: x.numpy(), HostRead),
    "copy_": (lambda x: torch.empty(3, 4).copy_(x), HostRead),
    "nonzero": (lambda x: x.nonzero(), HostRead),
    "a mask as an index": (lambda x: x[x > 0], HostRead),
    "equal": (lambda x: torch.equal(x, x), HostRead),
    "repeats without a size": (lambda x: x.repeat_interleave(x[:, 0].long(), 0), HostRead),
    "tensor": (lambda x: torch.tensor([1, 2], device=x.device), BlockingCopy),
    "to": (lambda x: torch.ones(3).to(x.device, non_blocking=True), BlockingCopy),
    "to, at once": (lambda x: torch.ones(3).pin_memory().to(x.device), BlockingCopy),
    "indices on the host": (lambda x: x[torch.tensor([0, 2])], BlockingCopy),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_at_its_line(name: str, machine: Machine) -> None:
    work, error = FAULTS[name]
    x = torch.ones(3, 4, device=DEVICE)
    with pytest.raises(error, match=r"at test_fake_cuda\.py:\d+"), a_step(machine):
        work(x)


def test_what_a_gpu_does_without_waiting_passes(machine: Machine) -> None:
    with a_step(machine):
        x = torch.ones(3, 4, device=DEVICE, requires_grad=True)
        y = (x * torch.tensor(2.0)).to(torch.bfloat16) @ torch.zeros_like(x).bfloat16().t()
        y.sum().backward()
        there = torch.arange(3).pin_memory().to(DEVICE, non_blocking=True)
        host = torch.empty(3, pin_memory=True)
        host.copy_(there, non_blocking=True)
    assert x.grad is not None and x.grad.is_cuda and x.grad.shape == (3, 4)
    assert there.device == DEVICE and host.tolist() == [1.0, 1.0, 1.0]
    assert torch.arange(3).tolist() == [0, 1, 2] and torch.empty(2, device="meta").is_meta
    assert not machine.reads and not machine.copies


def test_lists_of_reads_name_files() -> None:
    assert not IN_A_STEP.keys() & ELSEWHERE.keys()
    for name in IN_A_STEP | ELSEWHERE:
        assert (ROOT / f"packages/kenotron-{name}").is_file(), name
