"""ZeRO stage 3 in the program: a model larger than a rank's memory, weights that are read."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import numpy as np
import pytest
import runs

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh, RankError, spawn
from kenotron_engine import Piece, join_pieces, weight_pieces
from kenotron_models import parameter_count
from kenotron_train import LifeCycle
from kenotron_train.assemble import build_training
from kenotron_train.config_file import load_config
from kenotron_train.run import loop
from kenotron_train.run.initial import load_initial

LARGE = {
    "model__model_config__hidden_size": 512, "model__model_config__intermediate_size": 1024,
    "model__model_config__num_hidden_layers": 36, "parallelism__dp": 4, "parallelism__tp": 1,
    "parallelism__recompute": "full",
    "tokens__micro_batch_size": 1, "tokens__batch_accumulation_per_replica": 1,
    "tokens__limit_val_batches": 0, "tokens__train_steps": 2,
    "model__ddp_bucket_cap_mb": 2, "optimizer__optimizer_factory": "{name: sgd}",
    "optimizer__zero_stage": 3,
    "checkpoints__checkpoint_interval": 1, "checkpoints__checkpointing_engine": "torch",
}  # fmt: skip
"""95 million parameters; a rank of four keeps master and gradient of a quarter: half of 4 bytes."""
ROOM = 0.9
"""Memory of a rank beyond what it has before the model, in that of all parameters."""
M_MMAP_THRESHOLD = -3


def configure(folder: Path, **changes: object) -> Config:
    return load_config(DEFAULT_CONFIG, runs.arguments(folder, **changes)[1::2])


def data_bytes() -> int:
    """Private memory of this process, that of threads' stacks included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024


class Limited(LifeCycle):
    """A rank that has less memory left than the model's parameters need."""

    def pre_init(self, config: Config, mesh: Mesh) -> None:
        # Freed blocks go back to the system: else the allocator keeps those of some MB.
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**20)
        # A thread's stack counts whole, though it is hardly used: 8 MB for each that starts later.
        attributes = ctypes.create_string_buffer(64)
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(2**20))
        assert libc.pthread_setattr_default_np(attributes) == 0
        limit = data_bytes() + int(ROOM * 4 * parameter_count(config.decoder))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def limited(mesh: Mesh, config: Config) -> list[float]:
    return [result.loss for result in loop.run(mesh, config, hooks=(Limited(),)).results]


def test_a_model_larger_than_a_ranks_memory_is_trained_saved_and_resumed(tmp_path: Path) -> None:
    first = spawn(limited, configure(tmp_path, **LARGE), dp=4)[0]
    longer = configure(tmp_path, **{**LARGE, "tokens__train_steps": 3})
    then = spawn(limited, longer, dp=4)[0]
    assert len(first) == 2 and len(then) == 1 and then[0] < first[0]
    with pytest.raises(RankError, match="not enough device memory|allocate"):
        spawn(limited, configure(tmp_path, **{**LARGE, "optimizer__zero_stage": 1}), dp=4)


def begun(mesh: Mesh, config: Config) -> list[Piece]:
    training = build_training(config, mesh)
    load_initial(training)
    return weight_pieces(training)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_weights_are_read_into_slices(dtype: str, tmp_path: Path) -> None:
    done = runs.train(tmp_path, *runs.arguments(tmp_path, tokens__train_steps=1))
    assert done.returncode == 0, done.stderr
    source = {"model__init_method": f"{{path: {tmp_path / 'checkpoints'}}}", "model__dtype": dtype}
    one, many = (
        spawn(begun, configure(tmp_path, **source, optimizer__zero_stage=stage), dp=ranks)
        for stage, ranks in ((1, 1), (3, 3))
    )
    want, got = join_pieces(one), join_pieces(many)
    assert want.keys() == got.keys()
    assert all(np.array_equal(want[name], got[name]) for name in want)
