"""A long context cut over ranks: the losses of cp 1, 2 and 4, and the bytes that a rank keeps.

What the backward needs is counted where autograd keeps it, once for each piece of memory.
"""

import argparse
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from kenotron_data import Loader, PackedTokens, builtin_documents
from kenotron_dist import Mesh, spawn
from kenotron_engine import ModelPlan, build_training, training_step
from kenotron_models.families import LlamaConfig
from kenotron_optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig

LENGTH = 2048
MODEL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
)  # fmt: skip
ADAMW = OptimizerConfig(
    optimizer_factory=AdamWConfig(
        adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True
    ),
    zero_stage=1, weight_decay=0.01, clip_grad=1.0, accumulate_grad_in_fp32=True,
    learning_rate_scheduler=LRSchedulerConfig(learning_rate=1e-3, min_decay_lr=1e-4),
)  # fmt: skip
RANKS = (1, 2, 4)


class Kept:
    """Memory that autograd keeps in a step, in bytes; parameters are not counted."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Count the memory of a tensor that is kept."""
        if not (tensor.is_leaf and tensor.requires_grad):
            memory = tensor.untyped_storage()
            self.sizes[memory.data_ptr()] = memory.nbytes()
        return tensor


def train(mesh: Mesh, steps: int) -> tuple[list[float], int]:
    """Losses, and the bytes that this rank keeps in the first step. Runs on every rank."""
    text = "".join(builtin_documents(limit=400_000)).encode()
    corpus = PackedTokens(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), LENGTH)
    training = build_training(ModelPlan(spec=MODEL.decoder), ADAMW, mesh, steps)
    losses, kept = [], Kept()
    with Loader(corpus, seed=1, microbatches=1, micro_batch_size=1) as loader:
        with saved_tensors_hooks(kept, lambda tensor: tensor):
            losses.append(training_step(training, next(loader), 1).loss)
        losses += [training_step(training, next(loader), n).loss for n in range(2, steps + 1)]
    return losses, sum(kept.sizes.values())


def draw(losses: dict[int, Sequence[float]], kept: dict[int, float], file: str) -> None:
    """Draw the curves, and a bar for each number of ranks."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kenotron", "font.size": 11}
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8, 3.4), layout="constrained", width_ratios=(3, 2)
    )
    for (ranks, curve), style in zip(losses.items(), ("-", "--", ":"), strict=True):
        left.plot(range(1, len(curve) + 1), curve, style, linewidth=3, label=f"cp {ranks}")
    left.set(xlabel="step", ylabel="loss (nats a byte)", title=f"rows of {LENGTH} tokens")
    left.grid(alpha=0.3)
    left.legend()
    bars = right.bar([f"cp {ranks}" for ranks in kept], list(kept.values()), color="#2a78b5")
    right.bar_label(bars, fmt="%.1f")
    right.set(title="kept by a rank (MB)")
    right.margins(y=0.15)
    figure.savefig(file, metadata={"Date": None})


def main(steps: int, file: str) -> None:
    """Train on 1, 2 and 4 ranks of cp, compare and draw."""
    torch.set_num_threads(1)
    losses: dict[int, Sequence[float]] = {}
    kept: dict[int, float] = {}
    for ranks in RANKS:
        found = spawn(train, steps, cp=ranks)
        losses[ranks], kept[ranks] = found[0][0], max(most for _, most in found) / 1e6
        apart = max(abs(a - b) for a, b in zip(losses[ranks], losses[1], strict=True))
        print(f"cp {ranks}: losses within {apart:.0e} of one rank, {kept[ranks]:.1f} MB a rank")
        assert apart < 1e-3, apart
    assert kept[4] < kept[2] < kept[1]
    draw(losses, kept, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", default="long_context.svg", help="the picture")
    given = parser.parse_args()
    main(given.steps, given.out)
