"""The program over the fake NCCL: the losses of gloo, and ends that name their cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch.distributed as dist
from own_runs import PRELOAD, configure, documents, jsonl, trace
from test_train_stopping import flags, ranks_of, running

from kenotron_config import Config
from kenotron_dist import STALLED, Mesh, RankError, collectives, inplace_collectives, spawn
from kenotron_dist.torch_names import reduce_scatter_single

MODEL = {
    "model.dtype": "float32",
    "model.model_config.num_hidden_layers": 6,
    "model.model_config.tie_word_embeddings": "true",
    "tokens.micro_batch_size": 4,
    "tokens.batch_accumulation_per_replica": 1,
}
LAYOUTS = {
    "three stages, interleaved, one micro-batch": {
        "parallelism.pp": 3,
        "parallelism.pp_engine": "interleaved",
    },
    "eight ranks, recomputed, zero 1": {
        "parallelism.pp": 2,
        "parallelism.dp": 2,
        "parallelism.tp": 2,
        "parallelism.recompute_layer": "true",
        "optimizer.zero_stage": 1,
        "tokens.micro_batch_size": 1,
        "tokens.batch_accumulation_per_replica": 2,
    },
    "two replicas, zero 0": {
        "parallelism.dp": 2,
        "optimizer.zero_stage": 0,
        "tokens.micro_batch_size": 2,
    },
}
MODE = {
    "general.reproducible": "true",
    "optimizer.optimizer_factory.torch_adam_is_fused": "false",
    "optimizer.accumulate_grad_in_fp32": "true",
}
STALL_LIMIT = 3.0
SUM = dist.ReduceOp.SUM


def on_fake(mesh: Mesh, config: Config, cache: str) -> list[tuple[float, float]]:
    assert mesh.world.size == 1 or mesh.world.on_device
    return trace(mesh, config, cache)


def on_fake_adding_nothing(mesh: Mesh, config: Config, cache: str) -> list[tuple[float, float]]:
    """As `on_fake`, where a sum of NCCL has at most one number besides zeros, or integers."""
    added = []

    def checked(verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            source = given[-1] if verb is reduce_scatter_single else given[0]
            is_sum = named.get("op", given[1] if verb is dist.all_reduce else SUM) == SUM
            if is_sum and source.is_floating_point() and source.numel() > 1:  # no first call
                size, flat = dist.get_world_size(named["group"]), source.flatten()
                parts = flat.new_empty(size, flat.numel())
                dist.all_gather_into_tensor(parts.view(-1), flat, group=named["group"])
                if (parts != 0).sum(0).max() > 1:
                    added.append((verb.__name__, tuple(source.shape)))
            return verb(*given, **named)

        return call

    dist.all_reduce = checked(dist.all_reduce)
    for module in (collectives, inplace_collectives):
        module.reduce_scatter_single = checked(reduce_scatter_single)
    found = on_fake(mesh, config, cache)
    assert not added, added
    return found


def train(
    folder: Path, texts: Path, changes: dict[str, object], work: Callable[..., Any] = on_fake
) -> list[list[tuple[float, float]]]:
    """Losses and norms on every rank; all runs learn from the same four rows a step."""
    dataset = {"hf_dataset_or_datasets": str(texts)}
    config = configure(folder, dataset, MODEL | changes)
    sizes = config.parallelism.pp, config.parallelism.dp, config.parallelism.tp
    axes = dict(zip(("pp", "dp", "tp"), sizes, strict=True))
    cache = str(folder.parent / "cache")
    return spawn(work, config, cache, preload=PRELOAD, backend="fake_nccl", **axes)


def test_layouts_have_the_losses_of_one_process(tmp_path: Path) -> None:
    texts = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents()])
    [one] = train(tmp_path / "one", texts, {})
    for name, changes in LAYOUTS.items():
        for found in train(tmp_path / name.partition(",")[0], texts, changes):
            assert [loss for loss, _ in found] == pytest.approx([x for x, _ in one], rel=1e-5)
            assert [norm for _, norm in found] == pytest.approx([x for _, x in one], rel=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_the_reproducible_mode_they_have_its_bits(name: str, tmp_path: Path) -> None:
    texts = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents()])
    [one] = train(tmp_path / "one", texts, MODE)
    ranks = train(tmp_path / "mode", texts, MODE | LAYOUTS[name], on_fake_adding_nothing)
    assert all(found == one for found in ranks)
    if "parallelism.dp" in LAYOUTS[name]:  # the usual mode adds up gradients
        with pytest.raises(RankError, match="AssertionError: .*all_reduce|reduce_scatter"):
            train(tmp_path / "usual", texts, LAYOUTS[name], on_fake_adding_nothing)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_dies_or_stops_ends_all_and_is_named(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENOTRON_DEBUG", "fake_nccl")
    long = flags(tmp_path, "four", tokens__train_steps=100_000)
    with running(tmp_path, *long, "--stall-limit", str(STALL_LIMIT), steps=3) as process:
        victim = ranks_of(process.pid)[-1]
        os.kill(victim, number)
        began = time.monotonic()
        out, _ = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    if number == signal.SIGKILL:
        assert seconds < 20 and out.rstrip().endswith("rank 3: killed: died of SIGKILL"), out
        return
    assert process.returncode == STALLED and "rank 3 is stopped or dead" in out, out
    assert seconds < STALL_LIMIT + 20, seconds  # ten for the reports, the rest to clear away


def test_two_stages_generate_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = runs.arguments(tmp_path, tokens__train_steps=1, tokens__limit_val_batches=0)
    done = runs.train(tmp_path, *shape)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("KENOTRON_DEBUG", "fake_nccl")
    texts = []
    for pp in (1, 2):
        command = [sys.executable, str(runs.APP.with_name("generate")), "--pp", str(pp)]
        command += ["--ckpt-path", str(tmp_path / "checkpoints"), "--prompt", "ab"]
        command += ["--temperature", "0", "--max-new-tokens", "6"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1] != ""
