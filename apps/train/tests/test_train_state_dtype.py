"""``optimizer.state_dtype``: runs, checkpoints, and a resume with the other number format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import runs

from kenotron_ckpt import manifest_at
from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_cost.cost_plan import cost_plan
from kenotron_cost.stage_sizes import stage_sizes
from kenotron_dist import Mesh, spawn
from kenotron_train.config_file import load_config
from kenotron_train.run.loop import train

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")
OPTIMIZER = {"optimizer__optimizer_factory__torch_adam_is_fused": "true"}


def configure(folder: Path, dtype: str, **changes: object) -> Config:
    folder.mkdir(exist_ok=True)
    flags = runs.arguments(folder, optimizer__state_dtype=dtype, **OPTIMIZER, **changes)
    return load_config(DEFAULT_CONFIG, flags[1::2])


def dtypes(folder: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, record in manifest_at(folder).records.items():
        kind = name.split(".")[1] if name.startswith("optimizer.") else "parameter"
        found.setdefault(kind, set()).add(record.dtype)
    return found


@pytest.mark.parametrize(("before", "now"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_run_goes_on_with_the_other_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str, now: str
) -> None:
    whole = train(Mesh.connect(), configure(tmp_path / "a", before))
    saved = tmp_path / "a/checkpoints"
    kinds = {"exp_avg": {before}, "exp_avg_sq": {before}, "master": {"float32"}}
    assert dtypes(saved / "3") == kinds | {"parameter": {"float32"}}
    assert "converted" not in capsys.readouterr().out
    other = {"checkpoints__resume_checkpoint_path": saved / "3"}
    results = train(Mesh.connect(), configure(tmp_path / "b", now, **other))
    words = f"; state of the optimizer is converted from {before} to {now}"
    assert words in capsys.readouterr().out
    assert dtypes(tmp_path / "b/checkpoints/6")["exp_avg"] == {now}
    assert results[0].loss == whole[3].loss
    assert [r.loss for r in results] == pytest.approx([r.loss for r in whole[3:]], rel=1e-2)


def test_layouts_that_share_a_sum_have_the_same_bits(tmp_path: Path) -> None:
    flags = {"parallelism__pp": 2, "parallelism__dp": 2}
    found = []
    for stage in (0, 1):
        config = configure(tmp_path / str(stage), "bfloat16", optimizer__zero_stage=stage, **flags)
        found.append(spawn(train, config, pp=2, dp=2, preload=PRELOAD)[0])
    assert found[0] == found[1]
    again = replace(config.checkpoints, resume_checkpoint_path=str(tmp_path / "1/checkpoints/3"))
    again = replace(again, checkpoints_path=str(tmp_path / "again"))
    config = replace(config, checkpoints=again)
    assert spawn(train, config, pp=2, dp=2, preload=PRELOAD)[0] == found[1][3:]


def test_the_preview_counts_half_the_bytes(tmp_path: Path) -> None:
    (wide,), (narrow,) = (
        stage_sizes(cost_plan(configure(tmp_path, dtype))) for dtype in ("float32", "bfloat16")
    )
    assert wide.bytes_of["optimizer"] == 8 * wide.parameters
    assert narrow.bytes_of["optimizer"] == 4 * wide.parameters
