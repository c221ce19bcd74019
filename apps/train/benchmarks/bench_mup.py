"""Coordinate check: how far activations move in some steps, at several widths.

With maximal update parametrisation they move equally far at every width; with the standard one they
move farther the wider the model is. ``python bench_mup.py [FOLDER]`` writes ``mup.json`` and
``mup.svg``; the status is 1 if a slope is not what it should be.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from kenotron_data import Batch
from kenotron_dist import Mesh
from kenotron_engine import ModelPlan, Training, build_training, training_step
from kenotron_models import Context, Mup, multipliers_of, mup_scales
from kenotron_models.families import LlamaConfig
from kenotron_optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig

WIDTHS, STEPS, SEEDS = (64, 128, 256, 512, 1024), 10, 4
STD, RATE, VOCABULARY, TOKENS, ROWS, LENGTH = 0.1, 8e-3, 256, 8, 8, 32
LARGEST = 0.05
"""Largest slope of a coordinate with µP at the last step; the standard one exceeds SEEN."""
SEEN = 0.3
KINDS = ("attention", "mlp", "logits")
OPTIMIZER = OptimizerConfig(
    optimizer_factory=AdamWConfig(
        adam_eps=1e-12, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=False
    ),
    zero_stage=0,
    weight_decay=0.0,
    clip_grad=None,
    accumulate_grad_in_fp32=True,
    learning_rate_scheduler=LRSchedulerConfig(learning_rate=RATE),
)
Moves = dict[str, list[float]]
"""Root mean square of what a kind of activation moved since the first weights, at each step."""


def config(width: int) -> LlamaConfig:
    """A model whose heads grow, four at every width."""
    return LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
    )  # fmt: skip


def plan(width: int, seed: int, parametrisation: str) -> ModelPlan:
    """The same model at the first width, whatever the parametrisation."""
    spec = config(width).decoder
    if parametrisation == "standard":
        return ModelPlan(spec=spec, seed=seed, draws=(STD, "NUM_LAYERS"))
    mup = Mup(base=config(WIDTHS[0]).decoder)
    scales = mup_scales(spec, mup, "adamw", STD)
    return ModelPlan(spec=multipliers_of(spec, mup).applied(spec), seed=seed, scales=scales)


def batch_of(seed: int) -> Batch:
    """One batch of a few tokens in random order, learned again and again."""
    draws = torch.randint(
        TOKENS, (1, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    places = torch.arange(LENGTH).expand(1, ROWS, LENGTH).contiguous()
    samples = torch.arange(ROWS)[None]
    return Batch(draws[..., :-1].contiguous(), draws[..., 1:].contiguous(), places, samples)


def activations(training: Training, batch: Batch) -> dict[str, list[Tensor]]:
    """Outputs of all mixers, feed-forwards and the head, in fp32."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    hooks = []
    for name, module in training.model.stack.named_modules():
        kind = "logits" if name == "head" else name.rpartition(".")[2]
        if kind in KINDS:

            def keep(_: nn.Module, __: object, output: Tensor, kind: str = kind) -> None:
                found[kind].append(output.detach().clone())

            hooks.append(module.register_forward_hook(keep))
    with torch.no_grad():
        training.model.stack(batch.tokens_MBS[0].flatten(), Context(batch.positions_MBS[0]))
    for hook in hooks:
        hook.remove()
    return found


def moves(width: int, seed: int, parametrisation: str) -> Moves:
    """Train for some steps, and measure after each."""
    training = build_training(
        plan(width, seed, parametrisation), OPTIMIZER, Mesh.connect(), train_steps=STEPS
    )
    batch, found = batch_of(seed), defaultdict(list)
    first = activations(training, batch)
    for step in range(1, STEPS + 1):
        training_step(training, batch, step)
        for kind, now in activations(training, batch).items():
            pairs = zip(now, first[kind], strict=True)
            squares = [float((a - b).square().mean()) for a, b in pairs]
            found[kind].append(math.sqrt(sum(squares) / len(squares)))
    return found


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of a line through logarithms of both: the power of the width."""
    x, y = ([math.log2(each) for each in series] for series in (sizes, values))
    middle, mean = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - middle) * (b - mean) for a, b in zip(x, y, strict=True))
    return above / sum((a - middle) ** 2 for a in x)


def check() -> dict[str, dict[str, dict[str, list[list[float]] | list[float]]]]:
    """Moves by parametrisation and kind, step by step over widths, and their slopes."""
    found: dict[str, dict[str, dict[str, list[list[float]] | list[float]]]] = {}
    for parametrisation in ("mup", "standard"):
        by_width = [[moves(w, seed, parametrisation) for seed in range(SEEDS)] for w in WIDTHS]
        found[parametrisation] = {}
        for kind in KINDS:
            mean = [
                [sum(own[kind][step] for own in runs) / SEEDS for runs in by_width]
                for step in range(STEPS)
            ]
            slopes = [round(slope(WIDTHS, values), 3) for values in mean]
            rounded = [[round(value, 6) for value in values] for values in mean]
            found[parametrisation][kind] = {"moves": rounded, "slopes": slopes}
    return found


def picture(found: dict[str, dict[str, dict[str, list]]]) -> str:
    """An SVG: moves of each kind at the last step over widths, for both parametrisations."""
    colours = dict(zip(KINDS, ("#4278c8", "#3c965a", "#e18c32"), strict=True))
    values = [v for kinds in found.values() for own in kinds.values() for v in own["moves"][-1]]
    low, high = math.log2(min(values)), math.log2(max(values))
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="300" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for column, (name, kinds) in enumerate(found.items()):
        left = 30 + 310 * column
        parts.append(f'<text x="{left}" y="20">{name}: change after {STEPS} steps, by width</text>')
        for row, (kind, own) in enumerate(kinds.items()):
            points = " ".join(
                f"{left + 80 * i},{250 - 190 * (math.log2(v) - low) / (high - low):.1f}"
                for i, v in enumerate(own["moves"][-1])
            )
            colour, power = colours[kind], own["slopes"][-1]
            parts += [
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
                f'<text x="{left + 100 * row}" y="290" fill="{colour}">{kind} {power:+.2f}</text>',
            ]
        for i, width in enumerate(WIDTHS):
            parts.append(f'<text x="{left + 80 * i}" y="268" text-anchor="middle">{width}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(folder: Path) -> int:
    """Measure, write both files, and say what is not as it should be."""
    found = check()
    settings = {
        "widths": WIDTHS,
        "steps": STEPS,
        "seeds": SEEDS,
        "tokens": TOKENS,
        "std": STD,
        "rate": RATE,
    }
    text = json.dumps({"settings": settings, **found}, indent=1)
    (folder / "mup.json").write_text(text + "\n", encoding="utf-8")
    (folder / "mup.svg").write_text(picture(found), encoding="utf-8")
    for name, kinds in found.items():
        print(name, {kind: own["slopes"] for kind, own in kinds.items()})
    steep = max(abs(own["slopes"][-1]) for own in found["mup"].values())
    seen = max(own["slopes"][-1] for own in found["standard"].values())
    return int(steep > LARGEST or seen < SEEN)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
