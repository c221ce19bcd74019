"""Experts: tokens that each expert receives, step by step, with balancing and without.

Shapes: E experts of a layer, T tokens, K experts of a token.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from kenotron_data import Loader, PackedTokens, builtin_documents
from kenotron_dist import Mesh, spawn
from kenotron_engine import ModelPlan, build_training, training_step
from kenotron_models.families import MoEConfig, Qwen2Config
from kenotron_models.layers import Choice, Router
from kenotron_optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig

EXPERTS, LENGTH, RATE = 8, 64, 0.002
ADAMW = OptimizerConfig(
    optimizer_factory=AdamWConfig(
        adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True
    ),
    zero_stage=1, weight_decay=0.01, clip_grad=1.0, accumulate_grad_in_fp32=True,
    learning_rate_scheduler=LRSchedulerConfig(
        learning_rate=1e-3, lr_warmup_steps=10, min_decay_lr=1e-4
    ),
)  # fmt: skip


def model(rate: float) -> Qwen2Config:
    """Eight experts in the second layer, two for each token.

    Args:
        rate: what a step adds to the choice bias of an expert with too few tokens, and takes from
            one with too many (loss-free balancing, arXiv 2408.15664); 0: nothing balances.
    """
    experts = MoEConfig(
        num_experts=EXPERTS, top_k=2, moe_intermediate_size=64, router_aux_loss_coef=0.0,
        router_bias_rate=rate, layers=(1,), norm_topk_prob=True,
    )  # fmt: skip
    return Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        moe_config=experts,
    )  # fmt: skip


def train(mesh: Mesh, rate: float, steps: int) -> tuple[list[float], list[list[int]]]:
    """Losses, and the choices (E) of each step on this rank's tokens. Runs on every rank."""
    text = "".join(builtin_documents(limit=400_000)).encode()
    corpus = PackedTokens(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), LENGTH)
    training = build_training(ModelPlan(spec=model(rate).decoder), ADAMW, mesh, steps)
    [router] = [part for part in training.model.stack.modules() if isinstance(part, Router)]
    counts: list[torch.Tensor] = []

    def count(module: nn.Module, inputs: Any, chosen: Choice) -> None:
        counts[-1] += chosen.experts_TK.flatten().bincount(minlength=EXPERTS)

    router.register_forward_hook(count)
    losses, dp = [], mesh["dp"]
    with Loader(
        corpus, seed=1, microbatches=1, micro_batch_size=16 // dp.size,
        dp_rank=dp.rank, dp_size=dp.size,
    ) as loader:  # fmt: skip
        for step in range(1, steps + 1):
            counts.append(torch.zeros(EXPERTS, dtype=torch.int64))
            losses.append(training_step(training, next(loader), step).loss)
    return losses, [each.tolist() for each in counts]


def loads(rate: float, steps: int) -> tuple[list[float], np.ndarray]:
    """Losses and tokens of each expert (steps, E), on two ranks that have four experts each."""
    ranks = spawn(train, rate, steps, dp=2, ep=2)
    return ranks[0][0], np.sum([counts for _, counts in ranks], axis=0)


def draw(found: dict[str, np.ndarray], file: str) -> None:
    """Draw the share of each expert, one on top of the other."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kenotron", "font.size": 11}
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharey=True)
    for axes, (name, counts) in zip(panels, found.items(), strict=True):
        counts = counts[::2]  # of every second step: a smaller file
        shares: Sequence[np.ndarray] = list(100 * counts.T / counts.sum(1))
        colours = plt.get_cmap("tab10")(range(EXPERTS))
        axes.stackplot(range(1, 2 * len(counts), 2), shares, colors=colours)
        axes.set(xlabel="step", title=name, ylim=(0, 100))
        axes.margins(x=0)
    panels[0].set_ylabel("share of the tokens, %")
    figure.savefig(file, metadata={"Date": None})


def main(steps: int, file: str) -> None:
    """Train with balancing and without, compare with one process, and draw."""
    found = {}
    for name, rate in (("no balancing", 0.0), ("choice biases", RATE)):
        losses, counts = loads(rate, steps)
        busiest = (counts[-10:].max(1) / counts[-10:].mean(1)).mean()  # in the last steps
        print(f"{name}: loss {losses[-1]:.3f}, busiest expert {busiest:.2f} times the mean")
        found[name] = counts
    one, counts = spawn(train, RATE, min(steps, 10))[0]
    apart = max(abs(a - b) for a, b in zip(one, losses, strict=False))
    same = np.abs(np.array(counts) - found["choice biases"][: len(counts)]).max()
    print(f"one process: losses within {apart:.0e} of ep 2, loads within {same} tokens")
    assert apart < 1e-3, apart
    draw(found, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", default="experts_load.svg", help="the picture")
    given = parser.parse_args()
    main(given.steps, given.out)
