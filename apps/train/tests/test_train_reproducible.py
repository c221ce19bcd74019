"""Runs with ``general.reproducible``: what they say, what checkpoints keep, what a resume names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import runs
import torch

from kenotron_ckpt import read_manifest
from kenotron_config import GeneralConfig, ParallelismConfig
from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_train import reproducible

MODE = {
    "general__reproducible": "true",
    "optimizer__optimizer_factory__torch_adam_is_fused": "false",
    "tokens__micro_batch_size": 4,
    "tokens__batch_accumulation_per_replica": 1,
    "model__dtype": "float32",
}
GENERAL = GeneralConfig(project="p", reproducible=True)
PARALLELISM = ParallelismConfig(dp=1, pp=1, tp=1)


def trained(folder: Path, **changes: object) -> str:
    """What a run prints, which must succeed."""
    done = runs.train(folder, *runs.arguments(folder, **{**MODE, **changes}))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(folder: Path) -> list[tuple[float, float]]:
    return [(each["lm_loss"], each["grad_norm"]) for each in runs.metrics(folder)]


def test_a_run_on_other_ranks_is_the_same(tmp_path: Path) -> None:
    alone, cut, resumed = folders = [tmp_path / name for name in ("alone", "cut", "resumed")]
    for folder in folders:
        folder.mkdir()
    told = trained(alone)
    assert "Reproducible: each sample is computed alone" in told
    trained(cut, parallelism__dp=2, tokens__micro_batch_size=2)
    assert figures(cut) == figures(alone)
    told = trained(
        resumed,
        parallelism__tp=2,
        optimizer__zero_stage=0,
        checkpoints__resume_checkpoint_path=cut / "checkpoints" / "3",
    )
    assert "Resumed after step 3" in told and "; general.reproducible" not in told
    assert figures(resumed) == figures(alone)[3:]
    state = read_manifest(cut / "checkpoints" / "6").state["reproducible"]
    assert state == reproducible.conditions(GENERAL, PARALLELISM)


def test_a_resume_names_what_fixes_the_bits(tmp_path: Path) -> None:
    usual = {"general__reproducible": "false"}
    trained(tmp_path, **usual, tokens__train_steps=3)
    assert read_manifest(tmp_path / "checkpoints" / "3").state["reproducible"] is None
    told = trained(tmp_path, tokens__train_steps=4)
    assert "general.reproducible was false and is true" in told
    told = trained(tmp_path, general__reproducible_threads=2, tokens__train_steps=5)
    assert "general.reproducible: threads was 1 and is 2: bits may change" in told
    told = trained(tmp_path, **usual, tokens__train_steps=6)
    assert "general.reproducible was true and is false" in told


def test_another_number_of_threads_is_refused(tmp_path: Path) -> None:
    done = runs.train(tmp_path, *runs.arguments(tmp_path, **MODE), "--threads", "2")
    assert done.returncode != 0
    assert "--threads: 2 was given; general.reproducible computes with" in done.stderr


def differ(mesh: Mesh) -> str:
    found = {"threads": 1, "instructions": f"kind {mesh.rank}"}
    with mock.patch.object(reproducible, "conditions", lambda *_: found):
        with pytest.raises(ValueError, match="the ranks' conditions differ") as error:
            reproducible.check_conditions(GENERAL, PARALLELISM, mesh)
    return str(error.value)


def test_ranks_on_other_machines_are_named() -> None:
    told = on_ranks(differ, dp=2)
    assert "rank 1 has threads 1, instructions kind 1" in told[1]


def test_conditions_are_compared() -> None:
    now = reproducible.conditions(GENERAL, PARALLELISM)
    usual = GeneralConfig(project="p")
    assert now is not None and reproducible.conditions(usual, PARALLELISM) is None
    assert reproducible.changed_conditions(now, now) == ""
    assert reproducible.changed_conditions(None, None) == ""
    told = reproducible.changed_conditions({**now, "torch": "1.0"}, now)
    assert f"torch was 1.0 and is {torch.__version__}" in told


def test_with_chunks_the_order_of_tokens_is_a_condition() -> None:
    general, other = replace(GENERAL, reproducible_max_cp=2), replace(PARALLELISM, cp_block=64)
    before, now = (reproducible.conditions(general, each) for each in (PARALLELISM, other))
    told = reproducible.changed_conditions(before, now)
    assert told == "; general.reproducible: cp_block was 512 and is 64: bits may change"
    contiguous = replace(PARALLELISM, cp_layout="contiguous")
    now = reproducible.conditions(general, contiguous)
    assert "cp_layout was zigzag and is contiguous" in reproducible.changed_conditions(before, now)
    assert reproducible.conditions(GENERAL, other) == reproducible.conditions(GENERAL, PARALLELISM)
