"""One loss curve on two layouts: a Llama on text, on one process and on pp 2 x tp 2.

Shapes: (T,) tokens of the corpus.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from kenotron_data import Loader, PackedTokens, builtin_documents
from kenotron_dist import Mesh, spawn
from kenotron_engine import ModelPlan, build_training, training_step
from kenotron_models.families import LlamaConfig
from kenotron_optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig

MODEL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
ADAMW = OptimizerConfig(
    optimizer_factory=AdamWConfig(
        adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True
    ),
    zero_stage=1, weight_decay=0.01, clip_grad=1.0, accumulate_grad_in_fp32=True,
    learning_rate_scheduler=LRSchedulerConfig(
        learning_rate=1e-3, lr_warmup_steps=10, min_decay_lr=1e-4
    ),
)  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {"one process": {}, "pp 2 x tp 2": {"pp": 2, "tp": 2}}


def train(mesh: Mesh, steps: int) -> list[float]:
    """Loss of each step. Runs on every rank."""
    text = "".join(builtin_documents(limit=400_000)).encode()
    corpus = PackedTokens(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), 64)
    training = build_training(ModelPlan(spec=MODEL.decoder), ADAMW, mesh, steps)
    with Loader(corpus, seed=1, microbatches=2, micro_batch_size=8) as loader:
        steps_of = range(1, steps + 1)
        return [training_step(training, next(loader), step).loss for step in steps_of]


def draw(curves: dict[str, Sequence[float]], file: str) -> None:
    """Draw both curves, the second one dotted on the first."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kenotron", "font.size": 11}
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for (name, losses), style in zip(curves.items(), ("-", ":"), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, style, linewidth=3, label=name)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="A Llama on text")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def main(steps: int, file: str) -> None:
    """Train on both layouts, compare and draw."""
    curves = {name: spawn(train, steps, **layout)[0] for name, layout in LAYOUTS.items()}
    one, many = curves.values()
    apart = max(abs(a - b) for a, b in zip(one, many, strict=True))
    for name, losses in curves.items():
        print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"largest difference of two losses: {apart:.1e}")
    assert apart < 1e-3, apart
    draw(curves, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", default="two_layouts.svg", help="the picture")
    given = parser.parse_args()
    main(given.steps, given.out)
