"""One step of a model of transformers: by the bridge, and as its users train it.

Contestants of one process are the bridge on one rank and a plain loop over the same model with the
same attention, fused AdamW and clipping; of two processes the bridge with ZeRO stage 3 and FSDP2 on
every layer and the model. All take the same global batch, and weights are random. In every round
each contestant runs once, after a barrier; a round counts as long as its slowest rank, and the
table shows medians over the rounds and ratios of the bridge to the other. Every process has one
thread.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench_step import Step, first_batch, flags, ours, race, slowest, surroundings
from torch import Tensor, nn
from torch.nn import functional as F

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_data import Batch
from kenotron_dist import Mesh, MeshConfig, spawn
from kenotron_train.config_file import parse_config

SAMPLES, SEQUENCE = 4, 512
SIZES = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048,
    "max_position_embeddings": SEQUENCE,
}  # fmt: skip
ATTENTION = "sdpa"
BRIDGE, PLAIN = "bridge", "transformers"
SHARDED, FSDP = "bridge, ZeRO 3", "transformers, FSDP2"
PAIRS = {"one process": (BRIDGE, PLAIN, 1.02), "two processes": (SHARDED, FSDP, 1.0)}
"""Contestants by the number of processes, and the largest ratio."""


def configure(folder: Path, more: tuple[str, ...], **keys: object) -> Config:
    """The training of the model in a folder; ``more``: further keys."""
    dp = int(str(keys.get("parallelism.dp", 1)))
    changes: dict[str, object] = {
        "data_stages.0.data.dataset": "null",
        "model.model_config": json.dumps(
            {"is_hf_config": True, "path": str(folder), "attn_implementation": ATTENTION}
        ),
        "optimizer.optimizer_factory.torch_adam_is_fused": "true",
        "parallelism.dp": dp,
        "parallelism.tp": 1,
        "parallelism.tp_mode": "ALL_REDUCE",
        "tokens.batch_accumulation_per_replica": 1,
        "tokens.micro_batch_size": SAMPLES // dp,
        "tokens.sequence_length": SEQUENCE,
        **keys,
    }
    text = DEFAULT_CONFIG.read_text()
    return parse_config(text, "default.yaml", [*(f"{k}={v}" for k, v in changes.items()), *more])


def model_of(folder: Path) -> Any:
    """The same model, as its users make it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=ATTENTION
    )


def plain(model: nn.Module, adam: torch.optim.Optimizer, config: Config, batch: Batch) -> Step:
    """A plain loop over a batch: loss, gradients, clipping, AdamW."""
    max_norm = config.optimizer.clip_grad or torch.inf

    def step() -> float:
        adam.zero_grad()
        total = torch.zeros(())
        for micro in batch:
            logits: Tensor = model(micro.tokens_BS, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), micro.labels_BS.flatten()) / len(batch)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        adam.step()
        return float(total)

    return step


def contestants(mesh: Mesh, folder: Path, more: tuple[str, ...]) -> dict[str, tuple[Step, bool]]:
    """Name -> (step, whether both processes take part)."""
    from torch.distributed.fsdp import fully_shard

    adamw = {"betas": (0.9, 0.95), "weight_decay": 0.01}
    solo, one = Mesh(MeshConfig(), 0, torch.device("cpu")), configure(folder, more)
    alone = model_of(folder)
    fused = torch.optim.AdamW(alone.parameters(), **adamw, fused=True)
    two = configure(folder, more, **{"parallelism.dp": 2, "optimizer.zero_stage": 3})
    sharded, grid = model_of(folder), mesh.device_mesh()["dp"]
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=grid)
    fully_shard(sharded, mesh=grid)
    single = torch.optim.AdamW(sharded.parameters(), **adamw)  # fused takes no DTensors on a CPU
    return {
        BRIDGE: (ours(one, solo), False),
        PLAIN: (plain(alone, fused, one, first_batch(one, solo)), False),
        SHARDED: (ours(two, mesh), True),
        FSDP: (plain(sharded, single, two, first_batch(two, mesh)), True),
    }


def measure(mesh: Mesh, rounds: int, folder: Path, more: tuple[str, ...]) -> dict[str, list[float]]:
    """Seconds of every round on this rank, by contestant."""
    return race(mesh, rounds, contestants(mesh, folder, more))


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print both pairs."""
    options = flags("A model of transformers by the bridge.", 15, PAIRS).parse_args(words)
    with tempfile.TemporaryDirectory() as place:
        described = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
        (Path(place) / "config.json").write_text(json.dumps(described))
        ranks = spawn(measure, options.rounds, Path(place), tuple(options.set), dp=2)
    medians = slowest(ranks)
    print(f"{'processes':<14} {'bridge ms':>10} {'other ms':>9} {'ratio':>6} {'at most':>8}")
    for name, (bridge, other, most) in PAIRS.items():
        mine, theirs = medians[bridge], medians[other]
        print(
            f"{name:<14} {mine * 1e3:>10.0f} {theirs * 1e3:>9.0f} {mine / theirs:>6.3f} {most:>8}"
        )
    if options.json:
        found = {**surroundings(), "tokens": SAMPLES * SEQUENCE, "median_s": medians}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
