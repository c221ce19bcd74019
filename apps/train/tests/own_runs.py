"""Small runs on meshes of this machine, with tokenizers and data made here and now."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import runs

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_dist import Mesh, spawn
from kenotron_train.config_file import load_config
from kenotron_train.run.loop import train

PRELOAD = ("torch._dynamo", "kenotron_train.run.loop")
WORDS = "the a of alpha beta gamma delta été naïve question answer one two three".split()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATASET = "data_stages.0.data.dataset"
LAYOUTS = {
    "pp2": {"parallelism.pp": 2},
    "tp2": {"parallelism.tp": 2},
    "dp2": {"parallelism.dp": 2, "tokens.micro_batch_size": 1},
}
"""One process has micro-batches of two rows."""


def tokenizer(folder: Path, size: int = 300, eos: str | None = "<|im_end|>") -> Path:
    """A folder of a byte-level BPE of ``size`` ids with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos)
    wrapped.chat_template = CHATML
    wrapped.save_pretrained(folder)
    return folder


def documents(count: int = 120, seed: int = 0) -> list[str]:
    """Texts that a small model can learn something from."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 40))) for _ in range(count)]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def configure(folder: Path, dataset: object, changes: dict[str, object] | None = None) -> Config:
    """A tiny run in ``folder``; the value of ``dataset`` is that of the first stage's section."""
    values: dict[str, object] = runs.TINY | {
        "checkpoints.checkpoints_path": folder / "checkpoints",
        "tokens.limit_val_batches": 0,
        "tokens.train_steps": 4,
        "checkpoints.save_final_state": "false",
        "checkpoints.checkpoint_interval": 100,
        DATASET: json.dumps(dataset),
    }
    values |= changes or {}
    return load_config(DEFAULT_CONFIG, [f"{key}={value}" for key, value in values.items()])


def trace(mesh: Mesh, config: Config, cache: str, loader: Any = None) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    os.environ["KENOTRON_CACHE"] = cache
    return [(step.loss, step.grad_norm) for step in train(mesh, config, loader=loader)]


def run(
    folder: Path, dataset: object, changes: dict[str, object] | None = None, loader: Any = None
) -> list[tuple[float, float]]:
    """Train in ``folder`` with the cache beside it; the first rank's trace."""
    config = configure(folder, dataset, changes)
    sizes = config.parallelism
    cache = str(folder.parent / "cache")
    ranks = spawn(trace, config, cache, loader, **sizes.grid, preload=PRELOAD)
    assert all(found == ranks[0] for found in ranks), "ranks report different numbers"
    return ranks[0]
