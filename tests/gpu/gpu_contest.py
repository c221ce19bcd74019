"""Contestants of one shape that take turns in one process: bare torch, the libraries, transformers.

All run one micro-batch of one row, s=4096, bf16, causal attention, fused AdamW.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from bare_llama import BareLlama, training_step
from gpu_items import Item, Result, Setting, first_line
from gpu_probe import square_tflops
from gpu_trainer import (
    SHAPES,
    Micro,
    PlainStep,
    Trainer,
    draw_batch,
    fill_on_device,
    llama,
    sequence,
    step_rates,
)

from kenotron_dist import Mesh
from kenotron_models import peak_bf16_flops

STEPS, TURNS = 16, 4
"""Timed steps, in so many turns."""


def ceilings(setting: Setting) -> dict[str, float | None]:
    """Return what MFU is measured against: a product on this machine, and the maker's number."""
    name = torch.cuda.get_device_name(0) if setting.device == "cuda" else ""
    return {"measured product": square_tflops(setting) * 1e12, "peak": peak_bf16_flops(name)}


def transformers_step(setting: Setting, config: Any, batch: Micro) -> Callable[[], object]:
    """Return a step of transformers' Llama: bf16, sdpa, compiled, fused AdamW."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    fields = {name: getattr(config, name) for name in SHAPES["tiny"]}
    theirs = TheirConfig(
        **fields, max_position_embeddings=config.max_position_embeddings, use_cache=False,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)  # angles of the rotary embedding stay in fp32
    with torch.device(setting.device):
        model = LlamaForCausalLM(theirs)
    torch.set_default_dtype(torch.float32)
    fill_on_device(model)
    run, adam = torch.compile(model), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        run(batch.tokens_BS, labels=batch.labels_BS, shift_labels=batch.labels_BS).loss.backward()
        adam.step()
        adam.zero_grad()

    return step


def liger_step(setting: Setting, config: Any, batch: Micro) -> Callable[[], object]:
    """Return the same step with Liger's kernels; other models of this process get them too."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    return transformers_step(setting, config, batch)


def bare_step(setting: Setting, config: Any, batch: Micro) -> Callable[[], object]:
    """Return a step of ``bare_llama.py``."""
    with torch.device("meta"):
        model = BareLlama(**{name: getattr(config, name) for name in SHAPES["tiny"]})
    model = model.to(torch.bfloat16).to_empty(device=setting.device)
    fill_on_device(model)
    return training_step(model, batch.tokens_BS, batch.labels_BS, chunk=sequence(setting))


def our_step(setting: Setting, config: Any, batch: Micro) -> Callable[[], object]:
    """Return a step of the libraries: fp32 masters and gradient buffers, clipping."""
    mesh = Mesh.connect(device=setting.device)
    trainer = Trainer(config, mesh, dtype=torch.bfloat16, compiled=True)
    return lambda: trainer.step([batch])


def our_plain_step(setting: Setting, config: Any, batch: Micro) -> Callable[[], object]:
    """Return a step of the libraries' layers and head under torch's AdamW in bf16."""
    return PlainStep(config, Mesh.connect(device=setting.device), batch)


CONTESTANTS: dict[str, Callable[[Setting, Any, Micro], Callable[[], object]]] = {
    "bare torch, compiled": bare_step,
    "kenotron, compiled, fp32 masters": our_step,
    "kenotron's layers and head, compiled, plain AdamW": our_plain_step,
    "transformers, compiled": transformers_step,
}


def contest_item(
    name: str, shape: str, layers: int, seconds: float, needs: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None, dry: Sequence[str] = (),
) -> Item:  # fmt: skip
    """Make the item in which contestants of one shape take turns in one process.

    Args:
        name: of the item.
        shape: of ``SHAPES``.
        layers: so many of them.
        seconds: timeout.
        needs: modules without which it is not run.
        extra: who takes part; default: ``CONTESTANTS``.
        dry: those that take part in a dry run; default: all.
    """

    def run(setting: Setting) -> Iterator[Result]:
        mesh, config = Mesh.connect(device=setting.device), llama(setting, shape, layers=layers)
        (batch,) = draw_batch(config, mesh, micros=1, rows=1, length=sequence(setting), seed=0)
        limits, steps = ceilings(setting), {}
        yield {"measured product TFLOP/s": limits["measured product"] / 1e12}
        yield {"layers": config.num_hidden_layers}
        every = extra or CONTESTANTS
        some = {who: every[who] for who in setting.pick(list(every), dry or list(every))}
        for who, make in some.items():
            try:
                before = setting.held_bytes()
                began = time.perf_counter()
                steps[who] = make(setting, config, batch)
                setting.reset_peak()
                for _ in range(setting.pick(3, 1)):
                    steps[who]()
                peak = (setting.peak_bytes() - before) / 1e9
                yield {who: {"peak GB": peak, "first 3 steps s": time.perf_counter() - began}}
            except Exception as error:  # one that cannot run here does not end the others
                if setting.dry and not isinstance(error, ModuleNotFoundError):
                    raise
                steps.pop(who, None)
                yield {who: {"no": first_line(error)}}
            setting.empty_cache()
            yield from rates(setting, config, steps, limits)

    return Item(name, seconds, run, needs)


def rates(
    setting: Setting, config: Any, steps: dict[str, Callable[[], object]], limits: dict[str, Any]
) -> Iterator[Result]:
    """Yield the rate of each contestant, all in turns: again whenever one more has come."""
    medians = in_turns(setting, steps)
    first = next(iter(medians.values()), 1.0)
    for who, taken in medians.items():
        row = step_rates(config, taken, sequence(setting), limits)
        yield {f"{who}: rate": row | {"time / time of the first": taken / first}}


def in_turns(setting: Setting, steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return median seconds a step; contestants take turns in an order drawn for each."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    each = setting.pick(STEPS // TURNS, 1)
    order = list(steps)
    for _ in range(setting.pick(TURNS, 1)):
        random.shuffle(order)
        for name in order:
            several = setting.wall_seconds(lambda s=steps[name]: [s() for _ in range(each)], 1)
            taken[name].append(several[0] / each)
    return {name: statistics.median(found) for name, found in taken.items()}
