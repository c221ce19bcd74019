"""``optimizer.offload``: the same losses and files, and runs that resume with and without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import runs

from kenotron_ckpt import manifest_at, read_record
from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import spawn
from kenotron_train.config_file import load_config
from kenotron_train.run.loop import train

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")


def configure(folder: Path, offload: bool, stage: int, dtype: str) -> Config:
    folder.mkdir(exist_ok=True)
    sizes = {"parallelism__dp": 2, "optimizer__zero_stage": stage, "model__dtype": dtype}
    flags = runs.arguments(folder, optimizer__offload=str(offload).lower(), **sizes)
    return load_config(DEFAULT_CONFIG, flags[1::2])


def same_records(folder: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same tensors, to the bit."""
    ours, theirs = manifest_at(folder), manifest_at(other)
    assert ours.records.keys() == theirs.records.keys()
    return all(
        read_record(folder, ours, name).equal(read_record(other, theirs, name))
        for name in ours.records
    )


@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (3, "bfloat16")])
def test_losses_and_checkpoints_are_the_same(tmp_path: Path, stage: int, dtype: str) -> None:
    losses = {}
    for name, offload in (("plain", False), ("moved", True)):
        config = configure(tmp_path / name, offload, stage, dtype)
        losses[name] = spawn(train, config, dp=2, preload=PRELOAD)[0]
    assert losses["plain"] == losses["moved"]
    saved = {name: tmp_path / name / "checkpoints" for name in losses}
    assert same_records(saved["plain"] / "6", saved["moved"] / "6")
    for before, now in (("plain", True), ("moved", False)):
        folder = tmp_path / f"from {before}"
        config = configure(folder, now, stage, dtype)
        again = replace(config.checkpoints, resume_checkpoint_path=str(saved[before] / "3"))
        config = replace(config, checkpoints=again)
        assert spawn(train, config, dp=2, preload=PRELOAD)[0] == losses["plain"][3:]
        assert same_records(folder / "checkpoints/6", saved["plain"] / "6")
