"""Our Mixtral and Qwen3-MoE against transformers', and against dense models of their active size.

Forward, loss and backward of a model of 8 or of 64 experts on one process. transformers runs its
experts as a loop (``eager``) and as one grouped product. ``dense`` is our Llama or Qwen3 with a
feed-forward that is K times as wide as an expert: the same active FLOPs but for the router.
Contestants run in turns, in an order drawn for each round; the table shows medians of the elapsed
and of the CPU time. ``peak`` is the most memory that a process held beyond what it had before its
first step, in a process of its own.

    python bench_expert_models.py [--rounds 7] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_experts import DTYPES, about, in_turns
from torch import Tensor, nn

from kenotron_dist import Axis
from kenotron_models import Build, Context, LayerStack, build_decoder
from kenotron_models.families import LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoEConfig
from kenotron_tp import cross_entropy

ROWS, LENGTH, VOCABULARY = 2, 512, 4096
SHARED: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {"mixtral": (8, 2, 896), "qwen3_moe": (64, 8, 128)}
"""E, K, and the inner width of an expert."""
Step = Callable[[], float]


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels, (B, S) each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def our_config(family: str, *, dense: bool) -> Any:
    """Our config of a family, or of a dense one of its active size."""
    experts, top_k, features = SIZES[family]
    if family == "mixtral":
        if dense:
            return LlamaConfig(**SHARED, intermediate_size=top_k * features)
        return MixtralConfig(
            **SHARED, intermediate_size=features, num_local_experts=experts,
            num_experts_per_tok=top_k, router_aux_loss_coef=0.0,
        )  # fmt: skip
    if dense:
        return Qwen3Config(**SHARED, head_dim=64, intermediate_size=top_k * features)
    return Qwen3MoEConfig(
        **SHARED, head_dim=64, intermediate_size=top_k * features, moe_intermediate_size=features,
        num_experts=experts, num_experts_per_tok=top_k, norm_topk_prob=True,
        router_aux_loss_coef=0.0,
    )  # fmt: skip


def ours(family: str, dtype: torch.dtype, *, dense: bool = False) -> tuple[Step, nn.Module]:
    """A step of our model, head and loss in one."""
    axis = Axis.solo("tp")
    config = our_config(family, dense=dense)
    stack = LayerStack(build_decoder(config, Build(axis, device="cpu", dtype=dtype)))
    *layers, head = stack
    tokens, labels = batch()
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)

    def step() -> float:
        stack.zero_grad()
        context, x = Context(positions), tokens.flatten()
        for layer in layers:
            x = layer(x, context)
        loss, _ = cross_entropy(
            x, labels.flatten(), axis, weight=head.weight, reduction="sum", vocab_size=VOCABULARY
        )
        loss = loss / len(x)
        loss.backward()
        return loss.item()

    return step, stack


def theirs(family: str, dtype: torch.dtype, how: str) -> tuple[Step, nn.Module]:
    """A step of transformers' model, as its users write it."""
    from transformers import AutoModelForCausalLM
    from transformers import MixtralConfig as TheirMixtral
    from transformers import Qwen3MoeConfig as TheirQwen3

    experts, top_k, features = SIZES[family]
    sizes = SHARED | {"num_experts_per_tok": top_k, "use_cache": False}
    config: Any = (
        TheirMixtral(**sizes, intermediate_size=features, num_local_experts=experts)
        if family == "mixtral"
        else TheirQwen3(
            **sizes, head_dim=64, moe_intermediate_size=features, num_experts=experts,
            norm_topk_prob=True,
        )
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=how)
    if model.config._experts_implementation != how:
        raise RuntimeError(f"transformers runs {model.config._experts_implementation}, not {how}")
    tokens, labels = batch()

    def step() -> float:
        model.zero_grad()
        loss = model(tokens, labels=labels, shift_labels=labels).loss
        loss.backward()
        return loss.item()

    return step, model


CONTESTANTS: dict[str, Callable[[str, torch.dtype], tuple[Step, nn.Module]]] = {
    "ours": ours,
    "dense": lambda family, dtype: ours(family, dtype, dense=True),
    "transformers, eager": lambda family, dtype: theirs(family, dtype, "eager"),
    "transformers, grouped_mm": lambda family, dtype: theirs(family, dtype, "grouped_mm"),
}


def measured(family: str, kind: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds, elapsed and of the CPU, and peak memory of all contestants."""
    steps = {name: make(family, DTYPES[kind])[0] for name, make in CONTESTANTS.items()}
    return {
        name: taken | {"peak_mb": round(peak(name, family, kind) / 1e6)}
        for name, taken in in_turns(steps, rounds).items()
    }


def peak(name: str, family: str, kind: str) -> float:
    """Bytes that three steps add to what a fresh process holds."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (name, family, kind))


def _peak(name: str, family: str, kind: str) -> float:
    torch.set_num_threads(1)
    step, _ = CONTESTANTS[name](family, DTYPES[kind])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    for _ in range(3):
        step()
    return memory("VmHWM") - before


def memory(field: str) -> float:
    """Bytes of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = about(options.threads, options.rounds)
    print("| dtype | model | contestant | ms | CPU ms | times ours | peak MB |")
    print("|---|---|---|---|---|---|---|")
    for family in SIZES:
        for kind in options.kinds:
            figures = found[f"{kind} {family}"] = measured(family, kind, options.rounds)
            base = figures["ours"]["cpu_seconds"]
            for name, each in figures.items():
                ms, cpu = 1e3 * each["seconds"], 1e3 * each["cpu_seconds"]
                shown = f"{ms:.0f} | {cpu:.0f} | {1e-3 * cpu / base:.2f} | {each['peak_mb']:.0f}"
                print(f"| {kind} | {family} | {name} | {shown} |", flush=True)
    found["load average at the end"] = round(os.getloadavg()[0], 1)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
