"""A rank that reads the first weights of a model of transformers never has the whole model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from foreign_models import PRELOAD, configure, folder_of

from kenotron_config import Config
from kenotron_dist import Mesh, spawn
from kenotron_train.assemble import build_training
from kenotron_train.run.initial import load_initial

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
MB = 2**20
LAYOUTS = {
    "tp2 pp2": {"parallelism.tp": 2, "parallelism.pp": 2},
    "dp4 zero3": {"parallelism.dp": 4, "optimizer.zero_stage": 3}
    | {"tokens.batch_accumulation_per_replica": 1, "tokens.micro_batch_size": 1},
}


def resident(key: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{key}:\s*(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def measure_loading(mesh: Mesh, config: Config) -> tuple[int, int]:
    """Bytes that reading the first weights adds at most, and those of this rank's weights."""
    training = build_training(config, mesh)
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = resident("VmRSS")
    load_initial(training)
    added = resident("VmHWM") - before
    return added, sum(tensor.nbytes for tensor, _ in training.first_records().values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_read_by_slices(layout, tmp_path):
    folder = folder_of("qwen3", tmp_path / "model", **SIZES)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert size > 350 * MB
    config = configure(folder, tmp_path / "run", LAYOUTS[layout])
    grid = config.parallelism.grid
    ranks = spawn(measure_loading, config, **grid, preload=PRELOAD)
    print([(added // MB, own // MB) for added, own in ranks], size // MB)
    for added, own in ranks:  # some of a rank's weights may have had their memory before
        assert own < size / 3.5 and added < own + 32 * MB
