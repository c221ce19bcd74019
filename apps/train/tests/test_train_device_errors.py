"""Devices that cannot do what a config asks for: one message with need, what there is, and keys."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import runs
import torch
from torch import nn

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.host import MachineMemory
from kenotron_dist import Mesh, RankError, device
from kenotron_train import LifeCycle, train
from kenotron_train.assemble import decoder_layers
from kenotron_train.config_file import load_config
from kenotron_train.failures import device_errors
from kenotron_train.failures.device_errors import (
    NotEnoughMemory,
    check_bfloat16,
    explain_memory,
    remedies,
)
from kenotron_train.log import banner

TORCH = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
FREE = (
    "optimizer.zero_stage: 1; model.dtype: bfloat16; tokens.micro_batch_size below 2, with more "
    "batch_accumulation_per_replica; parallelism.recompute_layer: true; "
    "optimizer.state_dtype: bfloat16; optimizer.offload: true; optimizer.zero_stage: 2 or 3; "
    "more parallelism.tp or pp"
)


def configure(folder: Path, **changes: object) -> Config:
    flags = runs.arguments(folder, tokens__limit_val_batches=0, **changes)
    return load_config(DEFAULT_CONFIG, flags[1::2])


class Full(LifeCycle):
    """A device that is full as soon as the model is built."""

    def post_init(self, training):
        raise torch.OutOfMemoryError(TORCH)


class Large(nn.Module):
    """A layer that does not fit."""

    def forward(self, x, _context):
        raise torch.OutOfMemoryError(TORCH)


def with_large(config: Config, mesh: Mesh) -> list[tuple[str, nn.Module]]:
    *layers, head = decoder_layers(config, mesh)
    return [*layers, ("large", Large()), head]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("when", ["build", "step"])
def test_too_little_memory_is_explained(tmp_path: Path, pp: int, when: str) -> None:
    config = configure(tmp_path, parallelism__pp=pp)
    given = {"hooks": [Full()]} if when == "build" else {"model": with_large}
    with pytest.raises(RankError) as caught:
        train(config, **given)
    text = str(caught.value)
    assert caught.value.kind == "NotEnoughMemory" and caught.value.is_any(ValueError)
    assert "not enough device memory: " in text and "CUDA out of memory. By arithmetic a ra" in text
    assert "GB (parameters " in text and "What helps: model.dtype: bfloat16; tokens.micro" in text


def test_the_arithmetic_of_a_rank_and_the_memory_of_its_device(tmp_path: Path) -> None:
    sizes = {"parallelism__dp": 2, "optimizer__zero_stage": 0, "model__dtype": "bfloat16"}
    config = configure(tmp_path, **sizes)
    count = sum(p.numel() for _, each in decoder_layers(config, meta()) for p in each.parameters())
    text = explain_memory(cost_plan(config), 0, TORCH, MachineMemory(1.25e9, 8.59e9))
    for what, each in (("parameters", 2), ("gradients", 4), ("fp32 masters", 4), ("optimizer", 8)):
        assert f"{what} {count * each / 1e9:.3g}" in text
    assert "; its device has 8.59 GB, of which 1.25 are free. What helps: optimizer.zero_" in text
    moved = configure(tmp_path, optimizer__offload="true", **sizes)
    for gpu in (True, False):  # offloaded bytes are not on a GPU, and on a CPU there is one memory
        text = explain_memory(cost_plan(moved), 0, TORCH, None, gpu=gpu)
        assert ("masters" in text.partition(". What")[0]) is ("optimizer 0" in text) is not gpu


def meta() -> Mesh:
    return Mesh.connect(device="cpu")


def test_only_keys_that_help_are_named(tmp_path: Path) -> None:
    full = configure(tmp_path, parallelism__dp=2, optimizer__zero_stage=0)
    assert "; ".join(remedies(cost_plan(full), gpu=True)) == FREE
    assert "; ".join(remedies(cost_plan(full), gpu=False)) == FREE.replace(
        "optimizer.offload: true; ", ""
    )
    lean = configure(
        tmp_path, parallelism__dp=2, model__dtype="bfloat16", tokens__micro_batch_size=1,
        parallelism__recompute="full", optimizer__state_dtype="bfloat16",
        optimizer__offload="true",
    )  # fmt: skip
    assert remedies(cost_plan(lean), gpu=True) == [
        "optimizer.zero_stage: 2 or 3",
        "more parallelism.dp, with optimizer.zero_stage: 1", "more parallelism.tp or pp",
    ]  # fmt: skip
    sharded = configure(
        tmp_path, parallelism__dp=2, optimizer__zero_stage=3, optimizer__regather="step"
    )
    found = remedies(cost_plan(sharded), gpu=True)
    assert "optimizer.regather: layer" in found
    assert not any(each.startswith("optimizer.zero_stage") for each in found)


def test_other_errors_of_torch_pass_unchanged(tmp_path: Path) -> None:
    config = configure(tmp_path)
    with pytest.raises(RuntimeError, match="^shapes$"):
        with device_errors.device_errors(cost_plan(config), Mesh.connect()):
            raise RuntimeError("shapes")
    with pytest.raises(NotEnoughMemory, match="rank 0: .*CUBLAS_STATUS_ALLOC_FAILED when calling"):
        with device_errors.device_errors(cost_plan(config), Mesh.connect()):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")


def test_a_gpu_without_bfloat16_is_refused(tmp_path: Path) -> None:
    config = configure(tmp_path, model__dtype="bfloat16")
    words = (
        "model.dtype: bfloat16 was given, but the GPU of rank 3 has compute capability 7.5, and "
        r"bfloat16 needs 8.0 \(Ampere\) or more; set model.dtype to float16 or float32, or general"
    )
    with pytest.raises(ValueError, match=words):
        check_bfloat16(torch.bfloat16, (7, 5), 3)
    check_bfloat16(torch.bfloat16, (8, 0), 3)
    check_bfloat16(torch.float16, (7, 0), 3)
    there = mock.Mock(device=torch.device("cuda", 0), rank=3)
    with mock.patch.object(device_errors, "compute_capability", lambda: (7, 5)):
        with (
            pytest.raises(ValueError, match=words),
            device_errors.device_errors(cost_plan(config), there),
        ):
            raise AssertionError("the run must not begin")


def test_a_gpu_that_is_too_small_is_said_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = mock.Mock(device=torch.device("cuda", 0), rank=3)
    monkeypatch.setattr(device_errors, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(device_errors, "device_memory", lambda _: MachineMemory(2e5, 3e5))
    words = "of a rank need 0.*GB, but the GPU of rank 3 has 0.0003 GB, of which 0.0002 are free"
    with pytest.raises(NotEnoughMemory, match=words + ".*What helps: model.dtype: bfloat16"):
        with device_errors.device_errors(cost_plan(configure(tmp_path)), there):
            raise AssertionError("the run must not begin")


def test_an_allocation_on_a_cpu_is_explained(tmp_path: Path) -> None:
    config = configure(tmp_path)
    with pytest.raises(NotEnoughMemory, match="DefaultCPUAllocator.*its device has .* are free"):
        with device_errors.device_errors(cost_plan(config), Mesh.connect(device="cpu")):
            torch.empty(1 << 60, dtype=torch.uint8)


def test_a_gpu_that_is_asked_for_and_not_there(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    words = "a rank needs a GPU, but 0 can be seen .*: choose device"
    with pytest.raises(RankError, match=words):
        train(configure(tmp_path, general__device="cuda"))


SEEN = mock.Mock(current_accelerator=lambda: torch.device("cuda"), device_count=lambda: 2)
BLIND = mock.Mock(current_accelerator=lambda: torch.device("cuda"), device_count=lambda: 0)
NO_CUDA = mock.Mock(current_accelerator=lambda: None)


@pytest.mark.parametrize(
    ("accelerator", "nccl", "words"),
    [
        (SEEN, False, "torch sees 2, but is built without NCCL, by which ranks communicate"),
        (BLIND, True, "torch sees none: look at nvidia-smi and at CUDA_VISIBLE_DEVICES"),
        (NO_CUDA, False, "is built without CUDA: install a build that has it"),
        (SEEN, True, ""),
    ],
)
def test_why_there_is_no_gpu(
    accelerator: mock.Mock, nccl: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "accelerator", accelerator)
    monkeypatch.setattr(device.dist, "is_nccl_available", lambda: nccl)
    problem = device.gpu_problem()
    assert words in problem and bool(words) is bool(problem)
    if problem:
        with pytest.raises(ValueError) as caught:
            device.choose_device("cuda", None, 0, 2, problem)
        assert f"but 0 can be seen ({problem}): start fewer" in str(caught.value)
    monkeypatch.setattr(banner, "visible_gpus", lambda: 0)
    there = mock.Mock(world=mock.Mock(size=1))
    said, level = banner._why_cpu(there, "auto")
    advised = problem if "NCCL" in problem else problem.partition(": install")[0]
    assert said.endswith(f"({advised})") and (level == "warning") is ("NCCL" in problem)
    said, level = banner._why_cpu(there, "cpu")
    assert said.endswith("all ranks compute on CPUs, as general.device asks for")
    assert level == "info"
