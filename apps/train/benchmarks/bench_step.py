"""One training step of the default config's model: Hugging Face's loop, one process, two processes.

Two local processes. The contestants of one process run on the first while the second waits. All
take the same global batch; Hugging Face's model starts from its own weights. In every round each
contestant runs once, after a barrier; a round counts as long as its slowest rank, and the table
shows medians over the rounds. Every process has one thread, so two processes have two cores to one
process' one. Without ``transformers`` its line is left out. Lines with ``reproducible`` have
``general.reproducible: true``; their last column is the ratio to the same layout without it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from kenotron_config import DEFAULT_CONFIG, Config
from kenotron_data import Batch, Cursor
from kenotron_dist import Mesh, MeshConfig, barrier, spawn
from kenotron_engine import training_step
from kenotron_train.assemble import build_training, data_plan
from kenotron_train.config_file import parse_config
from kenotron_train.data.stage_dataset import open_corpus, open_loader

WARM_UP = 3
HUGGING_FACE = "transformers"
ONE = "one process"
Step = Callable[[], object]
EXPERTS = (
    "model.model_config={is_qwen2_config: true, hidden_size: 128, intermediate_size: 352, "
    "num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 257, "
    "max_position_embeddings: 128, moe_config: {num_experts: 8, top_k: 2, "
    "moe_intermediate_size: 176}}"
)
MUON = ("optimizer.optimizer_factory={name: muon}", "optimizer.weight_average={decay: 0.99}")
PAIRS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "tp 2": ({"tp": 2}, ()),
    "dp 2": ({"dp": 2}, ()),
    "pp 2": ({"pp": 2}, ()),
    "cp 2": ({"cp": 2}, ()),
    "dp 2, ep 2": ({"dp": 2, "ep": 2}, (EXPERTS,)),
    "dp 2, Muon, average": ({"dp": 2}, MUON),
    "dp 2, further token": ({"dp": 2}, ("model.mtp={weight: 0.3}",)),
}
"""Layouts of both processes: sizes and further keys."""


def configure(more: tuple[str, ...] = (), **sizes: int) -> Config:
    """The default with made-up tokens and the layout; the global batch stays the same.

    AdamW is fused. ``more``: further keys.
    """
    text = DEFAULT_CONFIG.read_text()
    sizes = {"pp": 1, "dp": 1, "tp": 1} | sizes
    changes: dict[str, object] = {f"parallelism.{name}": size for name, size in sizes.items()}
    changes["parallelism.tp_mode"] = "REDUCE_SCATTER" if sizes["tp"] > 1 else "ALL_REDUCE"
    changes["optimizer.optimizer_factory.torch_adam_is_fused"] = "true"
    changes["data_stages.0.data.dataset"] = "null"
    whole = parse_config(text, "default.yaml", [*more, *(f"{k}={v}" for k, v in changes.items())])
    changes["tokens.micro_batch_size"] = whole.tokens.micro_batch_size // sizes["dp"]
    return parse_config(text, "default.yaml", [*more, *(f"{k}={v}" for k, v in changes.items())])


def first_batch(config: Config, mesh: Mesh) -> Batch:
    with open_loader(
        data_plan(config), mesh, open_corpus(data_plan(config), 0), Cursor()
    ) as loader:
        return next(loader)


def ours(config: Config, mesh: Mesh) -> Step:
    training, batch = build_training(config, mesh), first_batch(config, mesh)
    return lambda: training_step(training, batch, 1)


def hugging_face(config: Config, batch: Batch) -> Step:
    """A plain loop: micro-batches, fused AdamW, ``clip_grad_norm_``; random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = config.model.model_config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps")
    heads = ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
    model = LlamaForCausalLM(LlamaConfig(**{n: getattr(llama, n) for n in (*names, *heads)}))
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    max_norm = config.optimizer.clip_grad or torch.inf

    def step() -> float:
        adam.zero_grad()
        total = torch.zeros(())
        for micro in batch:
            logits = model(micro.tokens_BS, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), micro.labels_BS.flatten()) / len(batch)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        adam.step()
        return float(total) + float(norm)

    return step


def contestants(more: tuple[str, ...], only: tuple[str, ...]) -> dict[str, tuple[Step, bool]]:
    """Name -> (step, whether both processes take part); ``only``: names of ``PAIRS``; (): all."""
    solo = Mesh(MeshConfig(), 0, torch.device("cpu"))
    found = {ONE: (ours(configure(more), solo), False)}
    if importlib.util.find_spec(HUGGING_FACE) and not only:
        step = hugging_face(configure(more), first_batch(configure(more), solo))
        found[HUGGING_FACE] = (step, False)
    for name in only or PAIRS:
        sizes, keys = PAIRS[name]
        found[name] = (ours(configure((*more, *keys), **sizes), Mesh.connect(**sizes)), True)
    return found


def measure(
    mesh: Mesh, rounds: int, more: tuple[str, ...], only: tuple[str, ...]
) -> dict[str, list[float]]:
    """Seconds of every round on this rank, by contestant."""
    return race(mesh, rounds, contestants(more, only))


def race(
    mesh: Mesh, rounds: int, steps: dict[str, tuple[Step, bool]], warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Seconds of every round on this rank, by contestant; each round begins with another."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(warm_up + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            step, together = steps[name]
            barrier(mesh.world)
            start = time.perf_counter()
            if together or mesh.rank == 0:
                step()
            if turn >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def slowest(ranks: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Median seconds of each contestant; a round counts as long as its slowest rank."""
    return {n: statistics.median(map(max, *(r[n] for r in ranks))) for n in ranks[0]}


def surroundings() -> dict[str, Any]:
    """Hardware, versions and commit that the figures belong to."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "commit": commit}
    return {"system": platform.platform(), "cores": os.cpu_count(), **versions}


def flags(description: str, rounds: int, layouts: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of a benchmark of layouts, which has so many rounds by default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--set", action="append", default=[], help="key=value of the config")
    names = {"action": "append", "default": [], "choices": [*layouts]}
    parser.add_argument("--only", help="a layout; may be given several times", **names)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print the contestants that flags name."""
    options = flags("Tokens per second of one training step.", 20, PAIRS).parse_args(words)
    more = tuple(options.set)
    ranks = spawn(measure, options.rounds, more, tuple(options.only), dp=2)
    medians = slowest(ranks)
    tokens = configure(more).global_batch_tokens
    print(f"{'contestant':<33} {'step ms':>8} {'tokens/s':>9}  of {ONE}")
    for name, median in medians.items():
        ratio = median / medians[ONE]
        print(f"{name:<33} {median * 1e3:>8.1f} {tokens / median:>9.0f} {ratio:>15.2f}")
    if HUGGING_FACE not in medians and not options.only:
        print(f"{HUGGING_FACE} is not installed: pip install './apps/train[bench]'")
    if options.json:
        found = {**surroundings(), "tokens": tokens, "median_s": medians}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
