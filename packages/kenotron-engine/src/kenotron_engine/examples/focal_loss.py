"""A loss of one's own: focal loss (Lin et al., arXiv 1708.02002), in which easy tokens count less.

The file runs on one process and on layouts of two, with the same losses:
``python packages/kenotron-engine/src/kenotron_engine/examples/focal_loss.py``.

Shapes: T tokens of a micro-batch on this rank, B rows, S sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kenotron_data import Loader, RandomTokens
from kenotron_dist import Mesh, spawn
from kenotron_engine import (
    MicroLoss,
    ModelOnMesh,
    ModelPlan,
    NextToken,
    Parts,
    Share,
    build_training,
    token_losses,
    training_step,
)
from kenotron_models.families import LlamaConfig
from kenotron_optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig


@dataclass(frozen=True)
class Focal(NextToken):
    """Cross entropy of each token times (1 - its probability) ** gamma."""

    gamma: float = 2.0

    def loss(self, model: ModelOnMesh, share: Share, count: Tensor) -> MicroLoss:
        """Return the loss of each micro-batch, divided by ``count`` (scalar), global targets."""

        def loss(x: Tensor, microbatch: int) -> Parts:
            losses_T = token_losses(model, x, share.micros[microbatch].labels_BS)
            weights_T = (1 - torch.exp(-losses_T)) ** self.gamma
            return Parts((weights_T * losses_T).sum() / count)

        return loss


LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=61
)
ADAMW = OptimizerConfig(
    optimizer_factory=AdamWConfig(
        adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True
    ),
    zero_stage=1, weight_decay=0.0, clip_grad=1.0, accumulate_grad_in_fp32=True,
    learning_rate_scheduler=LRSchedulerConfig(learning_rate=1e-2, min_decay_lr=1e-3),
)  # fmt: skip
SAMPLES = RandomTokens(61, 12, seed=1, samples=8)


def train(mesh: Mesh, steps: int = 5) -> list[float]:
    """Loss of each step. Runs on every rank."""
    training = build_training(ModelPlan(spec=LLAMA.decoder), ADAMW, mesh, steps)
    loader = Loader(
        SAMPLES, seed=7, microbatches=2, micro_batch_size=4 // mesh["dp"].size,
        dp_rank=mesh["dp"].rank, dp_size=mesh["dp"].size,
    )  # fmt: skip
    with loader:
        return [
            training_step(training, next(loader), step, objective=Focal()).loss
            for step in range(1, steps + 1)
        ]


if __name__ == "__main__":
    one = spawn(train)[0]
    print(f"one process: {one[0]:.4f} -> {one[-1]:.4f}")
    for axis in ("dp", "tp", "pp", "cp"):
        sizes: dict[str, Any] = {axis: 2}
        many = spawn(train, **sizes)[0]
        assert all(abs(a - b) < 1e-4 for a, b in zip(one, many, strict=True)), axis
        print(f"{axis} 2: the same to 1e-4")
