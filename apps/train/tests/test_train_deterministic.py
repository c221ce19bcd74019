"""Deterministic runs: every operation of a step has such a version, and one without is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from torch import nn

from kenotron_config import DEFAULT_CONFIG, Config, GeneralConfig
from kenotron_dist import Mesh, RankError
from kenotron_models.families import (
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)
from kenotron_train import LifeCycle, train
from kenotron_train.assemble import decoder_layers
from kenotron_train.config_file import load_config
from kenotron_train.replay.replay_comparison import Comparison, compared, comparison
from kenotron_train.run import loop
from kenotron_train.run.determinism import deterministic_algorithms

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
STARCODER = {**SIZES, "grouped_query": True, "num_kv_heads": 2}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2),
    "starcoder2": Starcoder2Config(**STARCODER, sliding_window_size=9, embd_pdrop=0.1),
}


def configure(folder: Path, **changes: object) -> Config:
    folder.mkdir(exist_ok=True)
    short = {"tokens__train_steps": 2, "tokens__limit_val_batches": 0}
    flags = runs.arguments(folder, **short, **changes)
    return load_config(DEFAULT_CONFIG, flags[1::2])


def losses(config: Config, folder: Path, wanted: bool) -> list[float]:
    checkpoints = replace(config.checkpoints, checkpoints_path=str(folder))
    with deterministic_algorithms(wanted):
        results = loop.train(Mesh.connect(), replace(config, checkpoints=checkpoints))
    return [number for each in results for number in (each.loss, each.grad_norm)]


@pytest.mark.parametrize(
    ("family", "recompute"),
    [*((family, "none") for family in FAMILIES), ("llama", "full"), ("llama", "selective")],
)
def test_a_step_of_every_family_is_deterministic(
    tmp_path: Path, family: str, recompute: str
) -> None:
    config = configure(tmp_path, parallelism__recompute=recompute, model__dtype="bfloat16")
    config = replace(config, model=replace(config.model, model_config=FAMILIES[family]))
    found = losses(config, tmp_path / "strict", True)
    assert found == losses(config, tmp_path / "plain", False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_compiled_step_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config = configure(tmp_path, model__compile="true")
    found = losses(config, tmp_path / "strict", True)
    assert found == losses(config, tmp_path / "plain", False)


class Settings(LifeCycle):
    """Writes down what torch and cuBLAS would do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def post_train_step(self, training, progress, result):
        cudnn = torch.backends.cudnn
        found = [
            torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        ]  # fmt: skip
        (self.folder / f"settings-{training.mesh.rank}").write_text(json.dumps(found))


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "tp_linear_async_communication": "true", "recompute_layer": "true"},
        {"pp": 2, "dp": 2, "pp_engine": "zb-v"},
    ],
    ids=str,
)
def test_every_rank_of_a_run_is_deterministic(tmp_path: Path, layout: dict) -> None:
    changes = {f"parallelism__{key}": value for key, value in layout.items()}
    config = configure(tmp_path, general__deterministic="true", **changes)
    train(config, hooks=[Settings(tmp_path)])
    for rank in range(config.world_size):
        found = json.loads((tmp_path / f"settings-{rank}").read_text())
        assert found == [True, True, False, ":4096:8"]


class Put(nn.Module):
    """Uses an operation that has no deterministic version, on CPUs too."""

    def forward(self, x, _context):
        where = torch.zeros(1, dtype=torch.int64, device=x.device)
        x.detach().clone().put_(where, torch.zeros(1, dtype=x.dtype, device=x.device))
        return x


def with_put(config: Config, mesh: Mesh) -> list[tuple[str, nn.Module]]:
    *layers, head = decoder_layers(config, mesh)
    return [*layers, ("put", Put()), head]


@pytest.mark.parametrize("pp", [1, 2])
def test_an_operation_without_deterministic_version_is_named(tmp_path: Path, pp: int) -> None:
    config = configure(tmp_path, general__deterministic="true", parallelism__pp=pp)
    with pytest.raises(RankError) as caught:
        train(config, model=with_put)
    assert caught.value.kind == "ValueError"
    assert "general.deterministic: true was given, but " in str(caught.value)
    assert "put_ does not have a deterministic implementation" in str(caught.value)
    assert str(caught.value).endswith(
        "set general.deterministic to false, or compute without that operation"
    )


def test_a_launched_rank_refuses_a_workspace_that_contradicts(tmp_path: Path) -> None:
    flags = runs.arguments(tmp_path, general__deterministic="true")
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "CUBLAS_WORKSPACE_CONFIG": ":8:8"}
    done = subprocess.run(
        [sys.executable, str(runs.APP), *flags],
        env=os.environ | environ, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: CUBLAS_WORKSPACE_CONFIG=:8:8 was given in the environment, but" in done.stderr


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(RuntimeError, match="^another$"), deterministic_algorithms(True):
        raise RuntimeError("another")


def test_an_unknown_device_is_named() -> None:
    words = "device: tpu was given; it must be one of auto, cpu, cuda"
    with pytest.raises(ValueError, match=words):
        GeneralConfig(project="p", device="tpu")


@pytest.mark.parametrize(
    ("device", "deterministic", "exact"),
    [("cpu", False, True), ("cpu", True, True), ("cuda", True, True), ("cuda", False, False)],
)
def test_what_decides_how_a_replay_is_compared(
    device: str, deterministic: bool, exact: bool
) -> None:
    how = comparison(device, deterministic)
    assert (how.loss == how.norm == 0) is exact
    assert str(how).startswith("compared bit for bit: " if exact else "compared within 0.001 (loss")


FOUND = {"step": 2, "cursor": {}, "loss": "5.0", "grad_norm": "2.0", "parameter": None}


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (comparison("cuda", False), "as in {}: loss, grad_norm"),
        (comparison("cuda", True), "not as in {}: loss 5.0 instead of 5.001, grad_norm 2.0 inst"),
        (Comparison(1e-5, 0.1, ""), "not as in {}: loss 5.0 instead of 5.001. Are config, flags"),
    ],
)
def test_a_replay_on_a_gpu_is_compared_within_a_tolerance(
    tmp_path: Path, how: Comparison, line: str
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 2, "lm_loss": 5.001, "grad_norm": 2.01}) + "\n")
    lines = compared(FOUND, tmp_path, how)
    assert any(each.startswith(line.format(file)) for each in lines)
    assert lines[-1] == str(how)
    assert compared(FOUND | {"step": 3}, tmp_path, how) == []


def test_the_record_of_a_step_is_compared_within_a_tolerance_too(tmp_path: Path) -> None:
    record = {
        "step": 2, "cursor": {}, "left_out": [], "samples": [1], "data": [], "loss": "5.001",
        "parameter": None,
    }  # fmt: skip
    (tmp_path / "nonfinite").mkdir()
    (tmp_path / "nonfinite/step-2.json").write_text(json.dumps(record))
    found = FOUND | {"samples": [1], "data": []}
    near, *_ = compared(found, tmp_path, comparison("cuda", False))
    assert near.endswith("step-2.json: samples, loss, parameter")
    exact = compared(found, tmp_path, comparison("cuda", True))
    assert any("loss 5.0 instead of 5.001" in line for line in exact)
    unknown, *_ = compared(found | {"loss": "nan"}, tmp_path, comparison("cuda", False))
    assert unknown.endswith("step-2.json: samples, parameter")
