"""A hybrid of Mamba-2 and attention: one curve on three layouts, next to either kind alone."""

import argparse
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from kenotron_data import Loader, PackedTokens, builtin_documents
from kenotron_dist import Mesh, spawn
from kenotron_engine import ModelPlan, build_training, training_step
from kenotron_models.families import NemotronHConfig
from kenotron_optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig

LENGTH = 128
ADAMW = OptimizerConfig(
    optimizer_factory=AdamWConfig(
        adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True
    ),
    zero_stage=1, weight_decay=0.01, clip_grad=1.0, accumulate_grad_in_fp32=True,
    learning_rate_scheduler=LRSchedulerConfig(
        learning_rate=1e-3, lr_warmup_steps=10, min_decay_lr=1e-4
    ),
)  # fmt: skip
HYBRID = "M-*-M-"
"""A letter for each layer: M Mamba-2, * attention, - feed-forward."""
OTHERS = {"Mamba-2 alone": "M-M-M-", "attention alone": "*-*-*-"}
LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"pp": 2}]


def model(layers: str) -> NemotronHConfig:
    """A small model; its attention has no positions, which Mamba-2 makes up for."""
    return NemotronHConfig(
        layers=layers, vocab_size=256, hidden_size=64, intermediate_size=128,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, mamba_num_heads=8,
        mamba_head_dim=16, ssm_state_size=16, n_groups=2, chunk_size=32,
        max_position_embeddings=LENGTH,
    )  # fmt: skip


def train(mesh: Mesh, layers: str, steps: int) -> list[float]:
    """Loss of each step. Runs on every rank."""
    text = "".join(builtin_documents(limit=400_000)).encode()
    corpus = PackedTokens(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), LENGTH)
    training = build_training(ModelPlan(spec=model(layers).decoder), ADAMW, mesh, steps)
    with Loader(corpus, seed=1, microbatches=2, micro_batch_size=4) as loader:
        steps_of = range(1, steps + 1)
        return [training_step(training, next(loader), step).loss for step in steps_of]


def draw(curves: dict[str, Sequence[float]], file: str) -> None:
    """Draw a curve for each model."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kenotron", "font.size": 11}
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, linewidth=2, label=name)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="Six layers on text")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def main(steps: int, file: str) -> None:
    """Train the hybrid on three layouts and the others on one process, compare and draw."""
    runs = [spawn(train, HYBRID, steps, **layout)[0] for layout in LAYOUTS]
    for layout, losses in zip(LAYOUTS, runs, strict=True):
        apart = max(abs(a - b) for a, b in zip(losses, runs[0], strict=True))
        print(f"{HYBRID} on {layout or 'one process'}: losses within {apart:.0e} of one process")
        assert apart < 1e-3, apart
    curves: dict[str, Sequence[float]] = {f"hybrid ({HYBRID})": runs[0]}
    for name, layers in OTHERS.items():
        curves[f"{name} ({layers})"] = spawn(train, layers, steps)[0]
    for name, losses in curves.items():
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    draw(curves, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", default="hybrid.svg", help="the picture")
    given = parser.parse_args()
    main(given.steps, given.out)
