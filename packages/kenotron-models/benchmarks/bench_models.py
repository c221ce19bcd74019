"""Our Llama against transformers' on one process: training steps, memory, and generation.

A training step is forward, loss, backward and a step of torch's fused AdamW. The contestants run in
turns, in an order drawn for each round; the table shows medians and the ratio to transformers in
eager mode. ``peak`` is the most memory that a process held beyond what it had before its first
step, in a process of its own. Generation is greedy, from a prompt of 64 tokens; ``read`` is the
share of the rate at which all weights can be read from memory (a sum over as many bytes, in turn
with the others), which no batch of one can exceed.

    python bench_models.py [--sizes small medium] [--rounds 7] [--json FILE] [--only train|generate]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kenotron_dist import Axis, Mesh, spawn
from kenotron_dist.placement import named_parameters
from kenotron_models import (
    Build,
    Context,
    LayerStack,
    Sampling,
    build_decoder,
    compile_layers,
    generate,
)
from kenotron_models.families import LlamaConfig
from kenotron_tp import cross_entropy

SIZES: dict[str, tuple[dict[str, int], int, int]] = {  # sizes, rows, tokens of a row
    "small": (
        {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32000}, 2, 512,
    ),
    "medium": (
        {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
         "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000}, 1, 1024,
    ),
    "wide": (
        {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 128256}, 1, 1024,
    ),
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPT, NEW = 64, 48
Step = Callable[[], float]


def ours(size: str, dtype: torch.dtype, *, compiled: bool = False) -> tuple[Step, nn.Module]:
    """A training step of this package's model, head and loss in one."""
    sizes, rows, length = SIZES[size]
    config = LlamaConfig(**sizes, max_position_embeddings=length, tie_word_embeddings=False)
    axis = Axis.solo("tp")
    stack = LayerStack(build_decoder(config, Build(axis, device="cpu", dtype=dtype)))
    *layers, head = stack
    if compiled:
        compile_layers(layers)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-4, fused=True)
    tokens, labels = batch(size)
    positions = torch.arange(length).expand(rows, length)

    def step() -> float:
        context = Context(positions)
        x = tokens.flatten()
        for layer in layers:
            x = layer(x, context)
        loss, _ = cross_entropy(
            x,
            labels.flatten(),
            axis,
            weight=head.weight,
            reduction="sum",
            vocab_size=sizes["vocab_size"],
        )
        loss = loss / len(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, stack


def theirs(size: str, dtype: torch.dtype, *, compiled: bool = False) -> tuple[Step, nn.Module]:
    """A training step of transformers' model, as its users write it."""
    model = their_model(size, dtype)
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, labels = batch(size)

    def step() -> float:
        loss = run(tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, model


def their_model(size: str, dtype: torch.dtype) -> Any:
    """transformers' Llama of a size, with random weights."""
    from transformers import AutoModelForCausalLM
    from transformers import LlamaConfig as TheirConfig

    sizes, _, length = SIZES[size]
    config = TheirConfig(**sizes, max_position_embeddings=length, use_cache=False)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def batch(size: str) -> tuple[Tensor, Tensor]:
    """Tokens and labels, (B, S) each."""
    sizes, rows, length = SIZES[size]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(sizes["vocab_size"], (rows, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


CONTESTANTS: dict[str, tuple[Callable[..., tuple[Step, nn.Module]], bool]] = {
    "ours": (ours, False),
    "ours, compiled": (ours, True),
    "transformers": (theirs, False),
    "transformers, compiled": (theirs, True),
}


def training(size: str, kind: str, rounds: int) -> list[dict[str, Any]]:
    """Medians of all contestants, in turns, and their peaks."""
    steps = {
        name: make(size, DTYPES[kind], compiled=c)[0] for name, (make, c) in CONTESTANTS.items()
    }
    seconds = in_turns(steps, rounds)
    _, rows, length = SIZES[size]
    base = statistics.median(seconds["transformers"])
    peaks = {name: peak(name, size, kind) for name in CONTESTANTS}
    return [
        {
            "what": "train", "size": size, "kind": kind, "name": name,
            "tokens_per_second": rows * length / statistics.median(taken),
            "times_transformers": base / statistics.median(taken),
            "peak_mb": peaks[name] / 1e6,
            "peak_over_transformers": peaks[name] / peaks["transformers"],
        }
        for name, taken in seconds.items()
    ]  # fmt: skip


def peak(name: str, size: str, kind: str) -> float:
    """Bytes that three steps add to the most that a fresh process holds."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (name, size, kind))


def _peak(name: str, size: str, kind: str) -> float:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    make, compiled = CONTESTANTS[name]
    step, _ = make(size, DTYPES[kind], compiled=compiled)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    for _ in range(3):
        step()
    return memory("VmHWM") - before


def memory(field: str) -> float:
    """Bytes of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def in_turns(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contestant in every round, after two to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for turn in range(rounds + 2):
        random.shuffle(order)
        for name in order:
            started = time.perf_counter()
            steps[name]()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def generating(mesh: Mesh, size: str, kind: str, texts: int, rounds: int) -> list[dict[str, Any]]:
    """Tokens a second of greedy generation, ours and transformers'."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sizes, _, _ = SIZES[size]
    _, stack = ours(size, DTYPES[kind])
    model = their_model(size, DTYPES[kind]).eval()
    ids = batch(size)[0].flatten()[: PROMPT * texts].view(texts, PROMPT)
    sizes_of = {n: p.numel() * p.element_size() for n, p in named_parameters(stack).items()}
    weights = sum(sizes_of.values()) - sizes_of["embedding.weight"]  # one row of it is read
    many = torch.ones(weights // 4)

    def our_text() -> None:
        for _ in generate(
            lambda tokens, context: stack(tokens, context), ids.tolist(), mesh, window=1024,
            vocab_size=sizes["vocab_size"], max_new_tokens=NEW, sampling=Sampling(),
        ):  # fmt: skip
            pass

    def their_text() -> None:
        with torch.inference_mode():
            model.generate(
                ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, use_cache=True,
                pad_token_id=0, attention_mask=torch.ones_like(ids),
            )  # fmt: skip

    def read() -> None:
        for _ in range(NEW):
            many.sum()

    seconds = in_turns({"ours": our_text, "transformers": their_text, "read": read}, rounds)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    return [
        {
            "what": "generate", "size": size, "kind": kind, "texts": texts, "name": name,
            "tokens_per_second": texts * NEW / median[name],
            "times_transformers": median["transformers"] / median[name],
            "share_of_reading": median["read"] / median[name],
        }
        for name in ("ours", "transformers")
    ]  # fmt: skip


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    where = f"{row['what']:9}{row['size']:7} {row['kind']} "
    more = (
        f"peak {row['peak_mb']:7.0f} MB {row['peak_over_transformers']:5.2f}x"
        if row["what"] == "train"
        else f"texts {row['texts']}  read {row['share_of_reading']:.2f}"
    )
    print(
        f"{where}{row['name']:24}{row['tokens_per_second']:9.1f} tokens/s "
        f"{row['times_transformers']:5.2f}x  {more}",
        flush=True,
    )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--kinds", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--only", choices=["train", "generate"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    found: list[dict[str, Any]] = []
    for size in arguments.sizes:
        for kind in arguments.kinds:
            rows = [] if arguments.only == "generate" else training(size, kind, arguments.rounds)
            if arguments.only != "train":
                for texts in (1, 8, 16):
                    rows += spawn(generating, size, kind, texts, arguments.rounds)[0]
            for row in rows:
                show(row)
            found += rows
    if arguments.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        about = {"torch": torch.__version__, "commit": commit, "machine": platform.machine(),
                 "cores": len(os.sched_getaffinity(0))}  # fmt: skip
        arguments.json.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
