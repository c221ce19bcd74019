"""Part ``speed``: layers, head, optimizer and whole steps; contestants are in ``gpu_contest``.

All sizes are of one micro-batch of one row, s=4096, bf16.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_contest import STEPS, TURNS, bare_step, ceilings, contest_item, liger_step
from gpu_items import Item, Result, Setting, item
from gpu_titan import MODULES as TITAN
from gpu_titan import titan_step
from gpu_trainer import (
    Trainer,
    draw_batch,
    fill_on_device,
    llama,
    parameters_of,
    sequence,
    step_rates,
)

from kenotron_dist import Axis, Mesh
from kenotron_models import Build, Context, Recompute, compile_layers
from kenotron_models import training_flops as flops_of
from kenotron_models.layers import Block
from kenotron_tp import cross_entropy

AXIS = Axis.solo("tp")
CHUNKS = (None, 512, 1024, 2048, 4096)
"""Tokens whose logits exist at a time; None is the library's own choice."""


@item("layer", 120)
def layer(setting: Setting) -> Iterator[Result]:
    """Forward and backward of one layer: eager, compiled, recomputed."""
    length = sequence(setting)
    context = Context(torch.arange(length, device=setting.device)[None])
    kinds: list[tuple[str, Recompute, bool]] = [
        ("eager", "none", False),
        ("compiled", "none", True),
        ("eager, full recompute", "full", False),
        ("eager, selective recompute", "selective", False),
    ]
    for shape in ("8b-wide", "1b"):
        config = llama(setting, shape, layers=1)
        products = flops_of(config, 1, length, causal=True)
        products -= 6 * length * config.hidden_size * config.vocab_size  # the head's
        x = torch.randn(
            length, config.hidden_size, device=setting.device, dtype=torch.bfloat16,
            requires_grad=True,
        )  # fmt: skip
        gradient = torch.randn_like(x)
        for name, recompute, compiled in kinds:
            own = Block(
                config.decoder.blocks[0],
                config.hidden_size,
                Build(AXIS, device=setting.device, dtype=torch.bfloat16),
                recompute=recompute,
            )
            fill_on_device(own)
            if compiled:
                compile_layers([own])
            inputs = [x, *own.parameters()]

            def call(own: Block = own, inputs: list[Any] = inputs, dy: Any = gradient) -> object:
                return torch.autograd.grad(own(inputs[0], context), inputs, dy)

            ms = setting.median_ms(call, repeats=20, warmup=5)
            setting.reset_peak()
            before = setting.held_bytes()
            call()
            peak = (setting.peak_bytes() - before) / 1e9
            yield {f"{shape}, {name}": {"ms": ms, "TFLOP/s": products / ms / 1e9, "peak GB": peak}}
            del own, call, inputs


@item("head", 60)
def head(setting: Setting) -> Iterator[Result]:
    """The summed cross entropy with chunks of several sizes, against whole logits, compiled."""
    tokens = sequence(setting)
    for shape in ("8b-wide", "1b"):
        config = llama(setting, shape)
        width, vocab = config.hidden_size, config.vocab_size
        labels = torch.randint(vocab, (tokens,), device=setting.device)
        leaves = [
            torch.randn(n, width, device=setting.device, dtype=torch.bfloat16).requires_grad_()
            for n in (tokens, vocab)
        ]
        x, weight = leaves

        def whole(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy((x @ weight.t()).float(), labels)

        ways: dict[str, Callable[[], torch.Tensor]] = {
            f"chunk {chunk or 'as chosen'}": partial(ours, x, weight, labels, vocab, chunk)
            for chunk in CHUNKS
        }
        ways["whole logits, compiled"] = partial(torch.compile(whole), x, weight, labels)
        for name, way in ways.items():

            def call(
                way: Callable[[], torch.Tensor] = way, leaves: list[torch.Tensor] = leaves
            ) -> object:
                return torch.autograd.grad(way(), leaves)

            ms = setting.median_ms(call, repeats=5, warmup=2)
            setting.reset_peak()
            before = setting.held_bytes()
            call()
            rate = 6 * tokens * width * vocab / ms / 1e9
            peak = (setting.peak_bytes() - before) / 1e9
            yield {f"{shape}, {name}": {"ms": ms, "TFLOP/s": rate, "peak GB": peak}}


def ours(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, vocab: int, chunk: int | None
) -> torch.Tensor:
    """Return the mean loss of the library's head."""
    return cross_entropy(
        x,
        labels,
        AXIS,
        weight=weight,
        reduction="sum",
        vocab_size=vocab,
        times=1 / len(x),
        chunk=chunk,
    )[0]


@item("optimizer", 60)
def optimizer(setting: Setting) -> Iterator[Result]:
    """Norm, clipping, update and publishing of the 1B shape: ms, and bytes moved a second."""
    mesh, config = Mesh.connect(device=setting.device), llama(setting, "1b")
    batch = draw_batch(config, mesh, micros=1, rows=1, length=setting.pick(256, 16), seed=0)
    for fused in (True, False):
        trainer = Trainer(config, mesh, dtype=torch.bfloat16, fused=fused)
        slices, _ = trainer.gradient(batch)
        trainer.optimizer.step(slices, 1e-4)
        count = parameters_of(trainer.stack)
        parts = {
            "norm": (lambda t=trainer, s=slices: t.norm(s), 4),
            "update and publish": (lambda t=trainer, s=slices: t.optimizer.step(s, 1e-4), 34),
            "publish": (lambda t=trainer: t.optimizer.publish(), 6),
        }
        for name, (call, per_parameter) in parts.items():
            ms = setting.median_ms(call, repeats=10, warmup=2)
            rate = per_parameter * count / ms / 1e6
            key = f"{name}, {'fused' if fused else 'not fused'}"
            yield {key: {"ms": ms, "GB/s": rate, "parameters": count}}
        del trainer, slices, parts, call
        setting.empty_cache()


def model_item(shape: str, seconds: float, *, compiled: bool, recompute: Recompute) -> Item:
    """Make the item that steps a whole model one way."""

    def run(setting: Setting) -> Iterator[Result]:
        mesh, config = Mesh.connect(device=setting.device), llama(setting, shape)
        length, limits = sequence(setting), ceilings(setting)
        batch = draw_batch(config, mesh, micros=1, rows=1, length=length, seed=0)
        setting.reset_peak()
        own = Trainer(config, mesh, dtype=torch.bfloat16, compiled=compiled, recompute=recompute)
        yield {"parameters": parameters_of(own.stack), "layers": config.num_hidden_layers}
        began = time.perf_counter()
        for _ in range(setting.pick(3, 1)):
            own.step(batch)
        setting.synchronize()
        yield {"s of the first 3 steps": time.perf_counter() - began} | programs()
        each = setting.pick(STEPS // TURNS, 1)
        taken = setting.wall_seconds(
            lambda: [own.step(batch) for _ in range(each)], setting.pick(TURNS, 1)
        )
        yield {"measured product TFLOP/s": limits["measured product"] / 1e12}
        yield step_rates(config, statistics.median(taken) / each, length, limits)
        yield {"peak GB": setting.peak_bytes() / 1e9}

    again = "" if recompute == "none" else f", {recompute} recompute"
    name = f"{shape}, {'compiled' if compiled else 'eager'}{again}"
    return Item(f"{name}: whole step", seconds, run)


def programs() -> Result:
    """Return how many programs torch.compile made in this process, and where graphs broke."""
    from torch._dynamo.utils import counters

    breaks = sum(counters["graph_break"].values())
    return {"compiled programs": counters["stats"]["unique_graphs"], "graph breaks": breaks}


ITEMS = [
    contest_item("1b, contestants", "1b", 16, 240),
    model_item("8b-wide", 70, compiled=True, recompute="none"),
    model_item("8b-wide", 50, compiled=False, recompute="none"),
    contest_item(
        "8b-wide, 6 layers, contestants", "8b-wide", 6, 150, dry=["bare torch, compiled"]
    ),
    head,
    layer,
    optimizer,
    model_item("1b", 60, compiled=True, recompute="none"),
    model_item("1b", 40, compiled=False, recompute="none"),
    model_item("8b-wide", 50, compiled=False, recompute="full"),
    model_item("8b-wide", 70, compiled=True, recompute="full"),
    model_item("1b", 40, compiled=False, recompute="selective"),
    contest_item(
        "1b, transformers with Liger's kernels", "1b", 16, 90, ("transformers", "liger_kernel"),
        {"bare torch, compiled": bare_step, "transformers, Liger, compiled": liger_step},
    ),
    contest_item(
        "1b, torchtitan", "1b", 16, 120, TITAN,
        {"bare torch, compiled": bare_step, "torchtitan, blocks compiled": titan_step},
    ),
    contest_item(
        "8b-wide, 6 layers, torchtitan", "8b-wide", 6, 120, TITAN,
        {"bare torch, compiled": bare_step, "torchtitan, blocks compiled": titan_step},
    ),
]  # fmt: skip
