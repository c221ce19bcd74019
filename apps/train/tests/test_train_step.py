"""A step refuses what it cannot train on, on every rank at once."""

from __future__ import annotations

import pytest
import torch

from kenotron_data import Batch
from kenotron_dist import Mesh, RankError, spawn
from kenotron_train.loop import train
from kenotron_train.step import NO_TARGET, global_count
from kenotron_train.yaml_config import DEFAULT_CONFIG, load_config


def count(mesh: Mesh, targets: list[int]) -> int:
    labels = torch.full((1, 1, 8), NO_TARGET)
    labels[0, 0, : targets[mesh["dp"].rank]] = 1
    zeros = torch.zeros(1, 1, 8, dtype=torch.int64)
    return global_count(Batch(zeros, labels, zeros, torch.zeros(1, 1, dtype=torch.int64)), mesh, 7)


def test_targets_of_all_data_ranks_are_counted() -> None:
    assert spawn(count, [3, 5], dp=2) == [8, 8]
    assert spawn(count, [0, 5], dp=2) == [5, 5]


def test_a_global_batch_without_targets_is_an_error_naming_the_step() -> None:
    with pytest.raises(RankError, match="step 7: no position of the global batch has a target"):
        spawn(count, [0, 0], dp=2)


def disagree(mesh: Mesh) -> None:
    config = load_config(DEFAULT_CONFIG, [f"general.seed={mesh.rank}"])
    train(mesh, config)


def test_ranks_with_different_configs_are_refused() -> None:
    with pytest.raises(RankError, match="the ranks were started with different configs"):
        spawn(disagree, tp=2)
