"""Where a training step makes the host wait for its device: the list is frozen here.

A step runs on device meta, which refuses nothing but to show a value: each place that asks for one
would block a process on an accelerator.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron_config import DEFAULT_CONFIG
from kenotron_data import Batch
from kenotron_dist import Mesh
from kenotron_engine import training_step
from kenotron_train.assemble import build_training
from kenotron_train.config_file import load_config

REPOSITORY = Path(__file__).parents[3]
META = torch.device("meta")


_ANSWERS = {"item": 1.0, "tolist": [1.0], "__bool__": True, "__int__": 1, "__float__": 1.0}
SHOWS = {getattr(torch.Tensor, name): answer for name, answer in _ANSWERS.items()}
"""What shows a value of a tensor, and what to answer for one on device meta."""


class Shows(TorchFunctionMode):
    """Notes who asks for a value."""

    def __init__(self, files: Counter[str]) -> None:
        super().__init__()
        self.files = files

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SHOWS and args[0].device == META:
            self.files[caller()] += 1
            return SHOWS[func]
        return func(*args, **(kwargs or {}))


class Copies(TorchDispatchMode):
    """Notes who copies between host and device and waits for it."""

    def __init__(self, files: Counter[str]) -> None:
        super().__init__()
        self.files = files

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name()
        if name in ("aten::_to_copy", "aten::copy_"):
            to = args[0].device if name == "aten::copy_" else kwargs.get("device", args[0].device)
            source = args[1].device if name == "aten::copy_" else args[0].device
            if {to.type, source.type} == {"cpu", "meta"} and not kwargs.get("non_blocking"):
                self.files[caller()] += 1
        return func(*args, **kwargs)


def caller() -> str:
    """The innermost file of this repository that is no test, or the test itself."""
    frame, found = sys._getframe(2), "the test"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        ours = path.is_relative_to(REPOSITORY) and "site-packages" not in path.parts
        if ours and "tests" not in path.parts:
            return str(path.relative_to(REPOSITORY))
        frame = frame.f_back
    return found


@contextmanager
def waits_in() -> Iterator[Counter[str]]:
    """Count, by file, what makes the host wait for device meta."""
    files: Counter[str] = Counter()
    with Shows(files), Copies(files):
        yield files


class OneRead:
    """Stands for ``DeviceRead``: counts, and gives numbers of a finite step."""

    made = 0

    def __init__(self, values: Any) -> None:
        OneRead.made += 1
        self._sizes = [value.numel() for value in values]

    def wait(self) -> list[list[float]]:
        return [[1.0] * size for size in self._sizes]


@pytest.fixture(autouse=True)
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused optimizers refuse device meta, although their kernel has it."""
    optimizer = importlib.import_module("torch.optim.optimizer")  # torch.optim hides the name
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    monkeypatch.setattr("kenotron_engine.step.DeviceRead", OneRead)
    monkeypatch.setattr("kenotron_engine.assembly.initialize", lambda *_, **__: None)


def waits(*flags: str) -> tuple[dict[str, int], int]:
    """Where the second step of a built-in model waits, and how often it reads the device."""
    config = load_config(DEFAULT_CONFIG, ["parallelism.tp=1", *flags])
    mesh = Mesh.connect(device="meta")
    training = build_training(config, mesh)
    rows, sequence = config.tokens.micro_batch_size, config.tokens.sequence_length
    tokens = torch.zeros(2, rows, sequence, dtype=torch.int64)
    samples = torch.zeros(2, rows, dtype=torch.int64)
    places = torch.arange(sequence).remainder(7).expand_as(tokens)
    batch = Batch(tokens, tokens, places, samples, documents_MBS=tokens).to("meta")
    with waits_in():
        training_step(training, batch, 1)
    OneRead.made = 0
    with waits_in() as files:
        training_step(training, batch, 2)
    return dict(files), OneRead.made


DOCUMENTS = (
    "model.model_config={is_qwen2_config: true, use_doc_masking: true, hidden_size: 64, "
    "intermediate_size: 128, num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 256, "
    "num_hidden_layers: 2, max_position_embeddings: 128}",
)
"""The smallest model whose tokens see their own document only."""
FUSED = "optimizer.optimizer_factory.torch_adam_is_fused=true"


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("model.dtype=bfloat16", "optimizer.accumulate_grad_in_fp32=true"),
        ("optimizer.clip_grad=null",),
        ("optimizer.nonfinite=skip", "parallelism.recompute_layer=true"),
        ("optimizer.zero_stage=1", "model.model_config.tie_word_embeddings=true"),
        DOCUMENTS,
    ],
    ids=lambda flags: " ".join(flags)[:60],
)
def test_a_step_reads_its_device_once_at_its_end(flags: tuple[str, ...]) -> None:
    assert waits(FUSED, *flags) == ({}, 1)


def test_an_update_that_is_not_fused_asks_before_it_updates() -> None:
    unfused = FUSED.replace("true", "false")
    assert waits(unfused) == (
        {"packages/kenotron-optim/src/kenotron_optim/sliced_optimizer.py": 1},
        1,
    )


def test_what_makes_a_host_wait_is_seen() -> None:
    x = torch.ones(2, device="meta")
    with waits_in() as files:
        assert bool(x[0]) and int(x[0]) and x[0].item() and x.tolist()
        torch.tensor([1.0, 2.0], device="meta")
        x.copy_(torch.ones(2))
        x.copy_(torch.ones(2), non_blocking=True)
        torch.full((2,), 3.0, device="meta")
    assert files == {"the test": 6}
