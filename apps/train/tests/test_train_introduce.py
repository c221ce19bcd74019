"""What the log begins with, where a host has no GPU, or too few."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import runs

from kenotron_config import DEFAULT_CONFIG
from kenotron_dist import Mesh
from kenotron_train.config_file import load_config
from kenotron_train.log import banner
from kenotron_train.run import loop

FEW = (
    "WARNING|DP=0|PP=0|TP=0]: 1 GPU can be seen on this host, which has 2 ranks: all ranks compute "
    "on CPUs, for a GPU serves one rank; to use GPUs start at most 1 on a host"
)
NONE = "INFO|DP=0|PP=0|TP=0]: 0 GPUs can be seen on this host, which has 1 rank: all ranks"


@pytest.mark.parametrize(("gpus", "ranks", "said"), [(0, 1, NONE), (1, 2, FEW)])
def test_a_run_on_cpus_says_why(
    gpus: int, ranks: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(DEFAULT_CONFIG, runs.arguments(tmp_path, tokens__train_steps=1)[1::2])
    seen = {"visible_gpus": lambda: gpus, "local_ranks": lambda size: ranks}
    with mock.patch.multiple(banner, **seen):
        loop.run(Mesh.connect(), config)
    assert said in capsys.readouterr().out
