"""Learning rates over widths: with µP the best one stays, with standard parametrisation it moves.

Each model trains on the sources of Python's standard library, as bytes.
``python bench_mup_rates.py [FOLDER]`` writes ``mup_rates.json`` and ``mup_rates.svg``; the status
is 1 if the best rate of µP is not the same at all widths.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from bench_mup import OPTIMIZER

from kenotron_data import Loader, PackedTokens, builtin_documents
from kenotron_dist import Mesh
from kenotron_engine import ModelPlan, build_training, training_step
from kenotron_models import Mup, multipliers_of, mup_scales
from kenotron_models.families import LlamaConfig
from kenotron_optim import AdamWConfig, LRSchedulerConfig

WIDTHS = (64, 128, 256, 512)
RATES = tuple(2.0**-power for power in range(11, 4, -1))
STEPS, WARM, ROWS, LENGTH, STD, LAST, VOCABULARY = 120, 12, 16, 32, 0.1, 20, 256
"""Updates, those of the warm-up, rows and tokens of a batch, first deviation, steps that the loss
is the mean of, bytes."""
PARAMETRISATIONS = ("mup", "standard")


def spec(width: int) -> LlamaConfig:
    """A model whose heads grow, four at every width."""
    return LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
    )  # fmt: skip


def plan(width: int, parametrisation: str) -> ModelPlan:
    """The same model at the first width, whatever the parametrisation."""
    decoder = spec(width).decoder
    if parametrisation == "standard":
        # Deviations of the usual rule for each width: 1 / sqrt(width), equal at the first one.
        std = STD * math.sqrt(WIDTHS[0] / width)
        return ModelPlan(spec=decoder, draws=(std, "NUM_LAYERS"))
    mup = Mup(base=spec(WIDTHS[0]).decoder)
    scales = mup_scales(decoder, mup, "adamw", STD)
    return ModelPlan(spec=multipliers_of(decoder, mup).applied(decoder), scales=scales)


def corpus() -> PackedTokens:
    """The first megabyte of the sources, as bytes."""
    text = b"".join(part.encode() for part in islice(builtin_documents(), 200))[: 1 << 20]
    return PackedTokens(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), LENGTH)


def loss_of(width: int, rate: float, parametrisation: str, data: PackedTokens) -> float:
    """Mean loss of the last steps; inf where the training diverges."""
    schedule = LRSchedulerConfig(
        learning_rate=rate, lr_warmup_steps=WARM, lr_decay_style="linear", min_decay_lr=rate / 10
    )
    rule = AdamWConfig(adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True)
    optim = replace(
        OPTIMIZER, learning_rate_scheduler=schedule, clip_grad=1.0, optimizer_factory=rule
    )
    training = build_training(plan(width, parametrisation), optim, Mesh.connect(), STEPS)
    losses = []
    with Loader(data, micro_batch_size=ROWS, microbatches=1, seed=1) as loader:
        for step in range(1, STEPS + 1):
            try:
                losses.append(training_step(training, next(loader), step).loss)
            except FloatingPointError:
                return math.inf
    return sum(losses[-LAST:]) / LAST


def best(losses: list[float]) -> int:
    """Place of the best rate in the grid."""
    return min(range(len(losses)), key=losses.__getitem__)


def picture(found: dict[str, list[list[float]]]) -> str:
    """An SVG: loss over rates, a line for each width, for both parametrisations."""
    colours = ("#4278c8", "#3c965a", "#e18c32", "#b43c3c")
    shown = [min(v, 4.0) for lines in found.values() for line in lines for v in line]
    low, high = min(shown), max(shown)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="700" height="300" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for column, (name, lines) in enumerate(found.items()):
        left = 30 + 350 * column
        parts.append(f'<text x="{left}" y="20">{name}: loss by learning rate and width</text>')
        for width, line, colour in zip(WIDTHS, lines, colours, strict=True):
            places = [
                (left + 44 * i, 250 - 200 * (min(v, 4.0) - low) / (high - low))
                for i, v in enumerate(line)
            ]
            points = " ".join(f"{x},{y:.1f}" for x, y in places)
            x, y = places[best(line)]
            label = left + 80 * WIDTHS.index(width)
            parts += [
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
                f'<circle cx="{x}" cy="{y:.1f}" r="4" fill="{colour}"/>',
                f'<text x="{label}" y="292" fill="{colour}">width {width}</text>',
            ]
        for i, rate in enumerate(RATES):
            parts.append(
                f'<text x="{left + 44 * i}" y="270" text-anchor="middle">2^{math.log2(rate):.0f}'
                "</text>"
            )
    return "\n".join([*parts, "</svg>", ""])


def main(folder: Path) -> int:
    """Measure, write both files, and say what is not as it should be."""
    data, found = corpus(), {}
    for name in PARAMETRISATIONS:
        found[name] = []
        for width in WIDTHS:
            begun = time.perf_counter()
            losses = [round(loss_of(width, rate, name, data), 4) for rate in RATES]
            found[name].append(losses)
            power = math.log2(RATES[best(losses)])
            taken = time.perf_counter() - begun
            print(f"{name} {width}: {losses}, best 2^{power:.0f} ({taken:.0f} s)", flush=True)
    places = {name: [best(line) for line in lines] for name, lines in found.items()}
    settings = {
        "widths": WIDTHS, "rates": RATES, "steps": STEPS, "rows": ROWS, "length": LENGTH, "std": STD
    }  # fmt: skip
    text = json.dumps({"settings": settings, "losses": found, "best": places}, indent=1)
    (folder / "mup_rates.json").write_text(text + "\n", encoding="utf-8")
    (folder / "mup_rates.svg").write_text(picture(found), encoding="utf-8")
    return int(len(set(places["mup"])) > 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
