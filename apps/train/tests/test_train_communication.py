"""What a run communicates: bytes of each axis by hand, and all ranks compared while it trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import runs
import torch

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_cp import AttentionSize, Cut, Visibility, attention_traffic
from kenotron_dist import Mesh, RankError, all_reduce, spawn
from kenotron_engine import StepResult
from kenotron_models import parameter_count
from kenotron_train.assemble import TrainingRun
from kenotron_train.config_file import load_config
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.progress import Progress
from kenotron_train.report.curves import read_runs, summary
from kenotron_train.run import loop

TOKENS, HIDDEN, LAYERS, MICRO = 64, 32, 2, 2
"""Of a micro-batch; and how many a step has."""
NORMS = 2 * LAYERS + 1
POWERS = 16 * 8 // 2
"""The other rank's half of the sums of squares of 15 tensors and a filling one, in fp64."""
WORLD = (16 // 2 + 4) * 8 + 4
"""This rank's half of the whole sums in fp64, its vote to stop with three times of its last step in
int64, and the loss."""


def config_of(folder: Path, **changes: object) -> Config:
    changes = {"tokens__train_steps": 3, "tokens__limit_val_batches": 0, **changes}
    return load_config(DEFAULT_CONFIG, runs.arguments(folder, **changes)[1::2])


def sent(folder: Path) -> list[dict[str, int]]:
    return [line["communication_bytes"] for line in runs.metrics(folder)]


def test_bytes_over_tp_are_activations_times_the_calls_of_layers(tmp_path: Path) -> None:
    config = config_of(tmp_path, logging__communication=True, parallelism__tp=2)
    spawn(loop.train, config, tp=2)
    # Each layer gathers its input and scatters its output twice, the embedding scatters, the head
    # gathers, and the backward does the opposite: half of an fp32 activation leaves each time.
    calls = 2 * (2 * 2 * LAYERS + 2)
    activations = calls * (TOKENS * HIDDEN * 4 // 2)
    losses = 5 * TOKENS * 4  # five numbers of each token for the softmax over the vocabulary
    norms = NORMS * HIDDEN * 4  # whose gradients are sums over tp
    assert (
        sent(tmp_path)
        == [{"tp": MICRO * (activations + losses) + norms + POWERS, "world": WORLD}] * 3
    )
    titles, line = summary(read_runs([str(tmp_path / "checkpoints")]))
    assert dict(zip(titles, line, strict=True))["sent a step (median)"] == "tp 167KB, world 100B"


def test_bytes_over_dp_are_gradients_and_parameters(tmp_path: Path) -> None:
    changes = {"parallelism__dp": 2, "tokens__micro_batch_size": 1}
    config = config_of(tmp_path, logging__communication=True, **changes)
    spawn(loop.train, config, dp=2)
    half = parameter_count(config.decoder) * 4 // 2  # to the other rank: its part of the sum
    updated = half  # and this rank's part, which it has updated
    counts, loss = 2 * 8, 4  # targets and real tokens
    expected = half + updated + counts + loss + POWERS
    assert sent(tmp_path) == [{"dp": expected, "world": WORLD}] * 3


@pytest.mark.parametrize("way", ["ring", "gather", "ulysses"])
def test_bytes_over_cp_are_those_of_attention_and_of_gradients(tmp_path: Path, way: str) -> None:
    changes = {"parallelism__cp": 2, "parallelism__cp_attention": way}
    changes["tokens__sequence_length"] = 30  # two tokens of padding
    config = config_of(tmp_path, logging__communication=True, **changes)
    spawn(loop.train, config, cp=2)
    mixer = config.decoder.blocks[0].mixer
    heads = mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.head_dim
    size = AttentionSize(config.tokens.micro_batch_size, *heads, torch.float32)
    attention = sum(attention_traffic(way, size, Visibility(30), Cut(30, 2), 0))
    half = parameter_count(config.decoder) * 4 // 2  # as over dp: ZeRO-1 shards over dp x cp
    loss = 4
    expected = MICRO * LAYERS * attention + 2 * half + loss + POWERS
    assert sent(tmp_path) == [{"cp": expected, "world": WORLD}] * 3


def test_nothing_is_counted_unless_it_is_asked_for(tmp_path: Path) -> None:
    spawn(loop.train, config_of(tmp_path, parallelism__tp=2), tp=2)
    assert all("communication_bytes" not in line for line in runs.metrics(tmp_path))
    titles, line = summary(read_runs([str(tmp_path / "checkpoints")]))
    assert dict(zip(titles, line, strict=True))["sent a step (median)"] == "-"


class OnOneRank(LifeCycle):
    """Code of a user that sums over tp on one rank only."""

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """Called after each step."""
        if training.mesh.rank == 3:
            all_reduce(torch.ones(3), training.mesh["tp"])  # the fault


def faulty(mesh: Mesh, config: Config) -> None:
    loop.run(mesh, config, hooks=(OnOneRank(),))


def test_a_call_on_one_rank_of_a_training_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KENOTRON_DEBUG", "collectives")
    config = config_of(tmp_path, parallelism__pp=2, parallelism__tp=2)
    with pytest.raises(RankError) as told:
        spawn(faulty, config, pp=2, tp=2)
    lines = Path(__file__).read_text().splitlines()
    [line] = [i for i, text in enumerate(lines, 1) if text.endswith("# the fault")]
    error, mine = told.value, f"(3,) at {Path(__file__).name}:{line}"
    told_by = f"{error.kind}: {error.reason}"  # by the rank itself, or by one that waited for it
    assert "Diverged: ranks diverge" in told_by and "on tp:2,3" in told_by
    assert f"rank 3 called all_reduce (sum) of float32 {mine}" in error.reason
    assert re.search(r"rank 2 called \w+.* of \w+ \(.*\) at \w+\.py:\d+", error.reason)


def test_a_run_whose_ranks_are_compared_has_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"pp": 2, "dp": 2, "tp": 2}
    changes = {f"parallelism__{name}": size for name, size in sizes.items()}
    changes["tokens__micro_batch_size"] = 1
    found = []
    for debug in ("", "collectives"):
        monkeypatch.setenv("KENOTRON_DEBUG", debug)
        folder = tmp_path / f"run{debug}"
        folder.mkdir()
        results = spawn(loop.train, config_of(folder, **changes), **sizes)
        found.append([(step.loss, step.grad_norm) for step in results[0]])
    assert found[0] == found[1] and len(found[0]) == 3
