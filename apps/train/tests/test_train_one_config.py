"""All ranks of a run must have the same config."""

from __future__ import annotations

import pytest

from kenotron_config import DEFAULT_CONFIG
from kenotron_dist import Mesh, RankError, spawn
from kenotron_train.config_file import load_config
from kenotron_train.run.loop import train


def disagree(mesh: Mesh) -> None:
    config = load_config(DEFAULT_CONFIG, [f"general.seed={mesh.rank}"])
    train(mesh, config)


def test_ranks_with_different_configs_are_refused() -> None:
    with pytest.raises(RankError, match="the ranks were started with different configs"):
        spawn(disagree, tp=2)
