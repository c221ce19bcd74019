"""Runs with ``general.reproducible``: what they say, what checkpoints keep, what a resume names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import runs
import torch

from kenotron_ckpt import read_manifest
from kenotron_config import Config, load_config
from kenotron_dist import Mesh
from kenotron_dist.testing import on_ranks
from kenotron_engine import ModelPlan, as_trained, changed_conditions
from kenotron_train import reproducible
from kenotron_train.assemble import plan_of

MODE = {
    "general__reproducible": "true",
    "optimizer__optimizer_factory__torch_adam_is_fused": "false",
    "tokens__micro_batch_size": 4,
    "tokens__batch_accumulation_per_replica": 1,
    "model__dtype": "float32",
}
FLAGS = (*(f"{key.replace('__', '.')}={value}" for key, value in MODE.items()), "parallelism.tp=1")
GPU = "NVIDIA H200, 13.0"
CONFIG = load_config(runs.TINY_LLAMA, FLAGS)


def conditions_of(config: Config) -> dict[str, Any] | None:
    cpu = torch.device("cpu")
    shards = plan_of(config).virtual_shards
    return reproducible.conditions(config.general, config.parallelism, config.model, shards, cpu)


def trained(folder: Path, **changes: object) -> str:
    """What a run prints, which must succeed."""
    done = runs.train(folder, *runs.arguments(folder, **{**MODE, **changes}))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(folder: Path) -> list[tuple[float, float]]:
    return [(each["lm_loss"], each["grad_norm"]) for each in runs.metrics(folder)]


def evaluated(folder: Path, *flags: str) -> tuple[float, bool]:
    """The loss on held-out samples that an evaluation of step 3 finds, and whether it warns."""
    step = ("--ckpt-path", "checkpoints/3", "--output", "found.json")
    done = runs.program("apps/train", folder, "evaluate", *step, "--perplexity", *flags)
    assert done.returncode == 0, done.stderr
    (source,) = json.loads((folder / "found.json").read_text())["sources"].values()
    return source["loss"], "general.reproducible: " in done.stdout


def validation_loss(folder: Path) -> float:
    return runs.metrics(folder)[2]["validation_loss"]


def test_a_run_on_other_ranks_is_the_same(tmp_path: Path) -> None:
    alone, cut, resumed = folders = [tmp_path / name for name in ("alone", "cut", "resumed")]
    for folder in folders:
        folder.mkdir()
    told = trained(alone)
    assert "Reproducible: each sample is computed alone" in told
    trained(cut, parallelism__dp=2, tokens__micro_batch_size=2, tokens__val_check_interval=3)
    assert figures(cut) == figures(alone)
    assert evaluated(cut, "--tp", "2", "--batch-size", "3") == (validation_loss(cut), False)
    assert evaluated(cut, "--threads", "2")[1]
    told = trained(
        resumed,
        parallelism__tp=2,
        optimizer__zero_stage=0,
        checkpoints__resume_checkpoint_path=cut / "checkpoints" / "3",
    )
    assert "Resumed after step 3" in told and "; general.reproducible" not in told
    assert figures(resumed) == figures(alone)[3:]
    state = read_manifest(cut / "checkpoints" / "6").state["reproducible"]
    assert state == conditions_of(CONFIG)


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
    with pytest.raises(ValueError, match="the ranks' conditions differ") as error:
        reproducible.check_conditions(found, mesh)
    return str(error.value)


def test_ranks_on_other_machines_are_named() -> None:
    told = on_ranks(differ, dp=2)
    assert "rank 1 has threads 1, instructions kind 1" in told[1]


def test_conditions_are_compared() -> None:
    now = conditions_of(CONFIG)
    usual = replace(CONFIG, general=replace(CONFIG.general, reproducible=False))
    assert now is not None and conditions_of(usual) is None
    assert changed_conditions(now, now) == ""
    assert changed_conditions(None, None) == ""
    told = changed_conditions({**now, "torch": "1.0"}, now)
    assert f"torch was 1.0 and is {torch.__version__}" in told
    told = changed_conditions({**now, "device": GPU}, now)
    assert f"device was {GPU} and is cpu: bits may change" in told
    older = {name: value for name, value in now.items() if name != "device"}
    assert changed_conditions(older, now) == ""
    older.pop("virtual_shards")
    told = "virtual_shards was not recorded and is 4: bits may change"
    assert told in changed_conditions(older, now)


def test_with_chunks_the_order_of_tokens_is_a_condition() -> None:
    alone = [*FLAGS, "parallelism.cp_block=64"]
    assert conditions_of(load_config(runs.TINY_LLAMA, alone)) == (conditions_of(CONFIG))
    flags = [*FLAGS, "general.reproducible_max_cp=2", "general.reproducible_max_tp=1"]
    before = conditions_of(load_config(runs.TINY_LLAMA, flags))
    for flag, words in (
        ("cp_block=64", "cp_block was 512 and is 64: bits may change"),
        ("cp_layout=contiguous", "cp_layout was zigzag and is contiguous: bits may change"),
    ):
        config = load_config(runs.TINY_LLAMA, [*flags, f"parallelism.{flag}"])
        told = changed_conditions(before, conditions_of(config))
        assert told == f"; general.reproducible: {words}"


def computed(mesh: Mesh, scores: bool, saved: dict[str, Any]) -> tuple[int, int, str]:
    plan, remark = as_trained(ModelPlan(spec=CONFIG.decoder), saved, mesh, scores=scores)
    return plan.virtual_shards, plan.virtual_chunks, remark


@pytest.mark.parametrize(
    ("axes", "scores", "changes", "found"),
    [
        ({"tp": 2}, True, {"torch": "1.0"}, (4, 1, "torch was 1.0 and is ")),
        (
            {"tp": 2},
            True,
            {"max_tp": 1, "virtual_shards": 1},
            (1, 1, "tp 2 does not divide the 1 virtual shards"),
        ),
        ({}, True, {"virtual_shards": 2}, (2, 1, "")),
        ({"cp": 2}, False, {}, (1, 1, "cp 2 does not divide the 1 virtual chunks")),
        (
            {"cp": 2},
            False,
            {"max_cp": 2, "max_tp": 1, "virtual_shards": 1, "cp_block": 8},
            (1, 2, ""),
        ),
        ({}, True, {"device": GPU}, (1, 1, f"the device is cpu, and was {GPU}")),
        ({"cp": 2, "tp": 2}, False, {"max_cp": 2}, (4, 2, "")),
        ({}, True, {"max_cp": 2, "max_tp": 1}, (1, 1, "texts are not scored in chunks")),
    ],
)
def test_a_checkpoint_computes_as_it_was_trained_or_says_why_not(
    axes: dict[str, int], scores: bool, changes: dict[str, Any], found: tuple[int, int, str]
) -> None:
    saved = (conditions_of(CONFIG) or {}) | changes
    for shards, chunks, remark in on_ranks(computed, scores, saved, **axes):
        assert (shards, chunks) == found[:2] and found[2] in remark
        assert bool(remark) == bool(found[2])
