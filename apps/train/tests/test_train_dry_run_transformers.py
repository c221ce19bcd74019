"""A dry run of models of transformers: ranks agree, a fault is found, others are refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from foreign_models import FAMILIES, FOUND, OTHERS
from torch import Tensor

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Axis
from kenotron_dist.diagnosis import Diverged
from kenotron_train.config_file import load_config
from kenotron_train.run import dry_run
from kenotron_train.run.dry_run import dry_run_of

pytest.importorskip("transformers")


def foreign(folder: Path, family: str, *more: str, **sizes: int) -> Config:
    """A model of transformers on a layout; the folder gets a config.json and no weights."""
    kinds = FAMILIES | OTHERS | FOUND
    (folder / "config.json").write_text(json.dumps(kinds[family] | {"model_type": family}))
    given = [f"parallelism.{axis}={size}" for axis, size in sizes.items()]
    model = {"is_hf_config": True, "path": str(folder)}
    first = "model.init_method={std: 0.02, scaling_method: NONE}"
    flags = [f"model.model_config={json.dumps(model)}", first, "data_stages.0.data.dataset=null"]
    return load_config(DEFAULT_CONFIG, [*flags, "tokens.sequence_length=64", *given, *more])


LORA = "model.adapter={rank: 2, alpha: 4, targets: [q_proj, down_proj]}"
CUT = "parallelism.tp_mode=REDUCE_SCATTER"
EP = {"pp": 2, "dp": 1, "tp": 2, "ep": 2}


@pytest.mark.parametrize(
    ("family", "more", "sizes", "described"),
    [
        ("gemma2", [CUT], {"dp": 1, "tp": 2}, "2 ranks, pp 1 x dp 1 x tp 2"),
        ("llama", [CUT, LORA], {"dp": 1, "tp": 2}, "2 ranks, pp 1 x dp 1 x tp 2"),
        ("mixtral", ["parallelism.tp_mode=ALL_REDUCE"], EP, "4 ranks, pp 2 x dp 1 x tp 2, ep 2"),
        (
            "mixtral", [CUT, "optimizer.zero_stage=3", "parallelism.recompute=full"],
            {"dp": 64, "tp": 2, "ep": 2}, "128 ranks, pp 1 x dp 64 x tp 2, ep 2",
        ),
    ],
)  # fmt: skip
def test_ranks_of_a_model_of_transformers_agree(
    family: str, more: list[str], sizes: dict[str, int], described: str, tmp_path: Path
) -> None:
    said = dry_run_of(foreign(tmp_path, family, *more, **sizes), 1)
    assert said.startswith(f"Dry run of {described}: agreed\n")
    sent = re.search(r"sends in the step\n(.*?)\n\n", said, re.DOTALL)
    assert sent is not None and "tp 0." in sent[1]
    assert all(f"{axis} 0." in " ".join(sent[1].split()) for axis in sizes if sizes[axis] > 1)


def test_a_sum_that_a_model_of_transformers_skips_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tp rank 1 keeps its own part of the results of row layers."""
    matmul = sys.modules["kenotron_tp.matmul"]  # the package has a function of this name
    real: Any = vars(matmul)["all_reduce"]

    def planted(x: Tensor, axis: Axis, *args: Any, **options: Any) -> Tensor:
        return x if axis.rank and not options else real(x, axis, *args, **options)

    monkeypatch.setattr(matmul, "all_reduce", planted)
    with pytest.raises(Diverged, match="called all_reduce"):
        dry_run_of(foreign(tmp_path, "llama", "parallelism.tp_mode=ALL_REDUCE", dp=1, tp=2), 1)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("bamba", r"model.layers.0 does not call ALL_ATTENTION_FUNCTIONS: tokens of a bamba see"),
        ("llama4_text", "on device meta"),
    ],
)
def test_a_family_that_needs_values_is_refused_by_name_before_a_rank_is_simulated(
    family: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "dry_run", lambda *_: pytest.fail("a rank was simulated"))
    with pytest.raises(ValueError, match=rf"(?s)a {family} cannot be .*{why}.*verify") as told:
        dry_run_of(foreign(tmp_path, family, "parallelism.tp_mode=ALL_REDUCE", dp=1, tp=1), 1)
    assert "set it to null" not in str(told.value) and "\n" not in str(told.value)
