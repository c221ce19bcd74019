"""A proxy that goes back: weights of domains are those of a run that never saw the bad batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from unittest import mock

import runs
from doremi_runs import STEPS, flags, write_domains

from kenotron_config import Config
from kenotron_data import Cursor
from kenotron_dist import Mesh, spawn
from kenotron_engine import DomainObjective
from kenotron_train.config_file import load_config
from kenotron_train.run import loop, session
from kenotron_train.run.domain_weights import read_average

BAD = Cursor(consumed=16)
"""Where the fifth batch of four samples begins."""
PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")


def train(mesh: Mesh, config: Config) -> list[tuple]:
    """A run whose fifth batch has a loss of nan."""
    right = DomainObjective.loss

    def weighted(self, model, share, count):
        whole = right(self, model, share, count)
        if all(BAD.consumed not in micro.samples_B for micro in share.micros):
            return whole
        return lambda x, m: whole(x, m)._replace(total=whole(x, m).total * math.nan)

    with mock.patch.object(DomainObjective, "loss", weighted):
        return [(r.loss, r.figures) for r in loop.train(mesh, config)]


def left_out(mesh: Mesh, config: Config) -> list[tuple]:
    """A run that leaves the fifth batch out from the beginning."""
    right = session.resume

    def resume(training, **asked):
        progress, remark = right(training, **asked)
        return replace(progress, left_out=(BAD,)), remark

    with mock.patch.object(session, "resume", resume):
        return [(r.loss, r.figures) for r in loop.train(mesh, config)]


def test_weights_are_those_of_a_run_without_the_batch(tmp_path: Path) -> None:
    write_domains(tmp_path)
    back = {"optimizer__nonfinite": "rollback", "tokens__limit_val_batches": 0}
    for command in ("reference", "losses"):
        done = runs.program(
            "apps/train", tmp_path, "doremi", command, *flags(tmp_path, "w", **back)
        )
        assert done.returncode == 0, done.stderr
    back["doremi__ref_model_resume_checkpoint_path"] = tmp_path / "w/reference"
    back["doremi__reference_losses_path"] = tmp_path / "w/proxy/reference_losses"
    found = {}
    for call in (train, left_out):
        words = flags(tmp_path, call.__name__, **back)
        (found[call],) = spawn(call, load_config(words[1], words[3::2]), preload=PRELOAD)
    assert found[train] == found[left_out] and len(found[train]) == STEPS
    assert read_average(tmp_path / "train") == read_average(tmp_path / "left_out")
