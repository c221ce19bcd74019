"""Our state-space and linear-attention mixers against transformers' torch paths and mambapy.

``train`` is forward and backward of one mixer. transformers' Mamba is its loop over tokens; with
mambapy installed its parallel scan is a contestant of its own. ``hybrid`` is a model of 8 layers,
two with attention and six with Mamba-2, against 8 layers of attention. ``generate`` is greedy, from
a prompt of 64 tokens. Contestants run in turns, in an order drawn for each round; the table has
medians of CPU time, and ratios of these: other work on the machine changes them little. ``peak`` is
the most memory that a process held beyond what it had before, in a process of its own. A contestant
is left out of a length at which one run would take longer than ``--limit``, if its time grew with
the square of the tokens.

    python bench_mixers.py [--lengths 512 2048 8192] [--rounds 3] [--threads 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_experts import about
from bench_models import memory
from torch import Tensor, nn

from kenotron_dist import Axis, Mesh, spawn
from kenotron_models import (
    Build,
    Context,
    DecoderSpec,
    LayerStack,
    Sampling,
    build_decoder,
    generate,
)
from kenotron_models.layers import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaSpec,
    Mamba2Spec,
    MambaSpec,
    MLPSpec,
)

WIDTH, VOCABULARY, PROMPT, NEW, LAYERS = 256, 4096, 64, 48, 4
MIXERS: dict[str, Any] = {
    "mamba": MambaSpec(channels=512, state=16, step_rank=16),
    "mamba2": Mamba2Spec(heads=8, head_dim=64, state=64, groups=1),
    "gated_delta": GatedDeltaSpec(key_heads=4, value_heads=8, key_dim=64, value_dim=64),
}
BUILD = Build(Axis.solo("tp"), device="cpu")
Run = Callable[[], Any]


def theirs(mixer: str, *, mambapy: bool = False) -> Any:
    """transformers' config of the sizes in ``MIXERS``."""
    import transformers as hf

    shared: dict[str, Any] = {
        "hidden_size": WIDTH, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS,
        "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0,
    }  # fmt: skip
    if mixer == "mamba":
        return hf.MambaConfig(**shared, expand=2, time_step_rank=16, use_mambapy=mambapy)
    if mixer == "mamba2":
        own = {"num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1, "chunk_size": 64}
        return hf.Mamba2Config(**shared, expand=2, **own)
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
             "linear_value_head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 64, "intermediate_size": 512, "num_experts": 0}  # fmt: skip
    kinds = ["linear_attention"] * (LAYERS - 1) + ["full_attention"]
    return hf.Qwen3NextConfig(**shared, **heads, layer_types=kinds)


def their_mixer(mixer: str, *, mambapy: bool = False) -> nn.Module:
    """transformers' module of one mixer, by its path in plain torch."""
    config = theirs(mixer, mambapy=mambapy)
    if mixer == "mamba":
        from transformers.models.mamba.modeling_mamba import MambaMixer

        return MambaMixer(config, 0)
    if mixer == "mamba2":
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

        return Mamba2Mixer(config, 0)
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    return Qwen3NextGatedDeltaNet(config, 0)


def settle(module: nn.Module) -> None:
    """Give the constants of a state the values that all contestants have."""
    with torch.no_grad():
        for name, each in module.named_parameters():
            if name.endswith("A_log"):
                each.copy_(torch.linspace(1, 16, each.shape[-1]).log().expand(each.shape))
            elif name.endswith(("dt_bias", "dt_proj.bias")):
                each.fill_(-4.0)


def step_of(what: str, name: str, length: int) -> Run:
    """Forward and backward of a mixer, or of a model (``hybrid``)."""
    torch.manual_seed(0)
    context = Context(torch.arange(length)[None])
    if what == "hybrid":
        stack = model(["mamba2", "mamba2", "mamba2", "attention"] * 2 if name == "hybrid" else
                      ["attention"] * 8)  # fmt: skip
        tokens = torch.randint(VOCABULARY, (length,))
        settle(stack)
        return lambda: stack(tokens, context).float().logsumexp(-1).sum().backward()
    x = torch.randn(1, length, WIDTH)
    if name == "ours":
        part = MIXERS[what].build(WIDTH, BUILD)
        settle(part)
        return lambda: part(x[0].requires_grad_(), context).square().sum().backward()
    module = their_mixer(what, mambapy=name == "mambapy")
    settle(module)
    return lambda: module(x.requires_grad_()).square().sum().backward()


def model(mixers: list[str], vocabulary: int = VOCABULARY) -> LayerStack:
    """A model with a mixer and a feed-forward in each layer; Mamba has none."""
    attention = AttentionSpec(heads=4, kv_heads=2, head_dim=64)
    blocks = tuple(
        BlockSpec(
            mixer=attention if each == "attention" else MIXERS[each],
            feed_forward=None
            if each == mixers[-1] in ("mamba", "mamba2")
            else MLPSpec(features=512),
        )
        for each in mixers
    )
    spec = DecoderSpec(
        hidden_size=WIDTH, vocab_size=vocabulary, max_position_embeddings=16384, blocks=blocks
    )
    stack = LayerStack(build_decoder(spec, BUILD))
    settle(stack)
    return stack


def contestants(what: str) -> list[str]:
    """Names, ours first."""
    if what == "hybrid":
        return ["hybrid", "attention"]
    more = what == "mamba" and importlib.util.find_spec("mambapy") is not None
    return ["ours", "transformers", *(["mambapy"] if more else [])]


def in_turns(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median CPU seconds of every contestant, after one round to warm up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for turn in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            started = time.process_time()
            runs[name]()
            if turn:
                taken[name].append(time.process_time() - started)
    return {name: statistics.median(each) for name, each in taken.items()}


def peak(what: str, name: str, length: int, threads: int) -> float:
    """Bytes that one run adds to the most that a fresh process holds."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (what, name, length, threads))


def _peak(what: str, name: str, length: int, threads: int) -> float:
    torch.set_num_threads(threads)
    run = step_of(what, name, length)
    step_of(what, name, 16)()  # what is made once
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    run()
    return memory("VmHWM") - before


def training(what: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians and peaks at all lengths."""
    rows: list[dict[str, Any]] = []
    expected = dict.fromkeys(contestants(what), 0.0)
    lengths = asked.lengths if what != "hybrid" else asked.lengths[-1:]
    following = dict(zip(lengths, (*lengths[1:], lengths[-1]), strict=True))
    for length in lengths:
        names = [name for name, seconds in expected.items() if seconds <= asked.limit]
        median = in_turns({name: step_of(what, name, length) for name in names}, asked.rounds)
        peaks = {name: peak(what, name, length, asked.threads) for name in names}
        for name in names:
            expected[name] = median[name] * (following[length] / length) ** 2
            rows.append({
                "what": "train", "mixer": what, "length": length, "name": name,
                "cpu_seconds": round(median[name], 4), "peak_mb": round(peaks[name] / 1e6, 1),
                "times_ours": round(median[name] / median[names[0]], 2),
            })  # fmt: skip
            show(rows[-1])
    return rows


def generating(mesh: Mesh, what: str, rounds: int, threads: int) -> list[dict[str, Any]]:
    """CPU seconds of a new token of greedy generation."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    last = "attention" if what == "gated_delta" else what
    stack = model([*[what] * (LAYERS - 1), last])
    other = AutoModelForCausalLM.from_config(theirs(what)).eval()
    settle(other)
    ids = torch.randint(1, VOCABULARY, (1, PROMPT))

    def our_text() -> None:
        for _ in generate(
            lambda tokens, context: stack(tokens, context), ids.tolist(), mesh, window=1024,
            vocab_size=VOCABULARY, max_new_tokens=NEW, sampling=Sampling(),
        ):  # fmt: skip
            pass

    def their_text() -> Tensor:
        with torch.inference_mode():
            return other.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                                  attention_mask=torch.ones_like(ids))  # fmt: skip

    median = in_turns({"ours": our_text, "transformers": their_text}, rounds)
    return [
        {
            "what": "generate", "mixer": what, "length": PROMPT + NEW, "name": name,
            "cpu_seconds": round(seconds / NEW, 5),
            "times_ours": round(seconds / median["ours"], 2),
        }
        for name, seconds in median.items()
    ]  # fmt: skip


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    memory = f"peak {row['peak_mb']:8.1f} MB" if "peak_mb" in row else ""
    print(
        f"{row['what']:9}{row['mixer']:12}{row['length']:6} {row['name']:13}"
        f"{row['cpu_seconds']:9.4f} s {row['times_ours']:6.2f}x  {memory}",
        flush=True,
    )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192])
    parser.add_argument("--mixers", nargs="+", default=[*MIXERS, "hybrid"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=150.0, help="CPU seconds of one run")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rows: list[dict[str, Any]] = []
    for what in asked.mixers:
        rows += training(what, asked)
        if what != "hybrid":
            made = spawn(generating, what, asked.rounds, asked.threads)[0]
            for row in made:
                show(row)
            rows += made
    if asked.json:
        load = {"load": [round(each, 1) for each in os.getloadavg()]}
        known = about(asked.threads, asked.rounds) | load
        asked.json.write_text(json.dumps(known | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
