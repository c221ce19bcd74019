"""What a rank on a CPU occupies does not grow from step to step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import runs
from own_runs import PRELOAD

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh, spawn
from kenotron_engine import StepResult
from kenotron_train.assemble import TrainingRun
from kenotron_train.config_file import load_config
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.progress import Progress
from kenotron_train.run.loop import run

STEPS = int(os.environ.get("KENOTRON_MEMORY_STEPS", "200"))
FIRST, GROWTH = 20, 1.05
SIZES = {
    "tokens__train_steps": STEPS, "tokens__limit_val_batches": 0, "tokens__sequence_length": 64,
    "tokens__micro_batch_size": 4, "model__model_config__hidden_size": 64,
    "model__model_config__intermediate_size": 128, "checkpoints__checkpoint_interval": 10**6,
    "checkpoints__save_final_state": False, "logging__iteration_step_info_interval": 10**6,
}  # fmt: skip
EXPERTS = {
    "is_mixtral_config": True, "vocab_size": 257, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LAYOUTS = {
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "dp2 x tp2, cut sequence": {"dp": 2, "tp": 2, "tp_mode": "REDUCE_SCATTER"},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2, "pp_engine": "1f1b"},
    "ZeRO 3": {"dp": 2, "zero_stage": 3},
    "ep2": {"dp": 2, "ep": 2},
}


class Occupied(LifeCycle):
    """Bytes of memory that the process occupies after each step."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def post_train_step(
        self, training: TrainingRun, progress: Progress, result: StepResult
    ) -> None:
        """Read them from the system."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.after.append(pages * os.sysconf("SC_PAGE_SIZE"))


def occupied(mesh: Mesh, config: Config) -> list[int]:
    hook = Occupied()
    run(mesh, config, hooks=(hook,))
    return hook.after


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it is read there")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_occupies_no_more_after_many_steps(layout: str, tmp_path: Path) -> None:
    axes = dict(LAYOUTS[layout])
    changes: dict[str, object] = {"optimizer__zero_stage": axes.pop("zero_stage", 1)}
    changes |= {f"parallelism__{key}": value for key, value in axes.items()}
    flags = runs.arguments(tmp_path, **SIZES, **changes)[1::2]
    if "ep" in axes:
        own = [flag for flag in flags if not flag.startswith("model.model_config.")]
        flags = [*own, f"model.model_config={json.dumps(EXPERTS)}"]
    config = load_config(DEFAULT_CONFIG, flags)
    sizes = {key: value for key, value in axes.items() if isinstance(value, int)}
    for rank, after in enumerate(spawn(occupied, config, **sizes, preload=PRELOAD)):
        assert len(after) == STEPS
        first, rest = max(after[FIRST // 2 : FIRST]), max(after[FIRST:])
        assert rest <= GROWTH * first, f"rank {rank}: {first / 1e6:.0f} MB, then {rest / 1e6:.0f}"
