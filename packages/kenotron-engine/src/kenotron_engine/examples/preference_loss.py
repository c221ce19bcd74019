"""A loss of one's own: direct preference optimisation (Rafailov et al., arXiv 2305.18290).

Of each pair of rows the first is preferred. The policy that is trained is compared with itself
before the first step. The file runs on one process and on layouts of two, with the same losses:
``python packages/kenotron-engine/examples/preference_loss.py``.

Shapes: M micro-batches, B rows of a micro-batch (B / 2 pairs), n tokens of a row on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_data import Batch, Loader, RandomTokens
from kenotron_dist import Mesh, all_reduce, spawn
from kenotron_engine import (
    MicroLoss,
    ModelOnMesh,
    ModelPlan,
    Parts,
    Share,
    batch_losses,
    build_training,
    global_counts,
    token_losses,
    training_step,
)
from kenotron_models.families import LlamaConfig
from kenotron_optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig


@dataclass(frozen=True)
class Preference:
    """-log sigmoid(beta * (log-ratio of the preferred row - that of the other)), over all pairs."""

    reference_MB: Tensor
    """(M, B) log-likelihood of each row of this rank under the reference."""
    beta: float = 0.1

    reports = ("preferred", "margin")
    columns = 0

    def counts(self, batch: Batch, mesh: Mesh) -> Tensor:
        """Pairs of the global batch, and its tokens but padding: (2,) int64."""
        pairs = (batch.samples_MB[:, ::2] >= 0).sum().to(mesh.device)
        return torch.stack([all_reduce(pairs, mesh["dp"]), global_counts(batch, mesh)[1]])

    def loss(self, model: ModelOnMesh, share: Share, count: Tensor) -> MicroLoss:
        """The loss of pairs; ranks of cp have parts of rows, whose sums all of them need.

        ``count`` is a scalar.
        """
        cp = model.mesh["cp"]

        def loss(x: Tensor, microbatch: int) -> Parts:
            micro = share.micros[microbatch]
            own_B = -token_losses(model, x, micro.labels_BS).view_as(micro.labels_BS).sum(-1)
            whole_B = all_reduce(own_B.detach(), cp).requires_grad_()
            ratio_B = whole_B - self.reference_MB[microbatch].to(x.device)
            margin = self.beta * (ratio_B[::2] - ratio_B[1::2])
            real = micro.samples_B[::2] >= 0
            total = -(F.logsigmoid(margin) * real).sum() / count.to(margin.dtype)
            (slope_B,) = torch.autograd.grad(total, whole_B)
            # The value of the loss, once over cp, and the gradient through this rank's tokens.
            linear = (slope_B * own_B).sum()
            value = total.detach() / cp.size + linear - linear.detach()
            better = ((margin > 0) & real).sum() / count / cp.size
            return Parts(value, (better, (margin * real).sum() / count / cp.size))

        return loss

    def reported(self, loss: Tensor, reports: Tensor) -> Tensor:
        """All of the loss, a scalar, is reported; ``reports`` (r,)."""
        return loss

    def outcome(
        self, loss: float, reports: Sequence[float], rows: Sequence[float]
    ) -> tuple[float, dict[str, Any]]:
        """The loss, the share of pairs that are ordered as preferred, and their mean margin."""
        return loss, dict(zip(self.reports, reports, strict=True))


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
PAIRS = RandomTokens(61, 13, seed=1, samples=8)


def train(mesh: Mesh, steps: int = 10) -> list[tuple[float, float]]:
    """Loss and share of ordered pairs of each step. Runs on every rank."""
    training = build_training(ModelPlan(spec=LLAMA.decoder), ADAMW, mesh, steps)
    loader = Loader(
        PAIRS, seed=7, microbatches=2, micro_batch_size=4 // mesh["dp"].size,
        dp_rank=mesh["dp"].rank, dp_size=mesh["dp"].size,
    )  # fmt: skip
    with loader:
        batch = next(loader)
    reference = -batch_losses(training, batch).sum(-1).view_as(batch.samples_MB)
    objective, found = Preference(reference), []
    for step in range(1, steps + 1):
        result = training_step(training, batch, step, objective=objective)
        found.append((result.loss, result.figures["preferred"]))
    return found


if __name__ == "__main__":
    one = spawn(train)[0]
    print(f"loss {one[0][0]:.4f} -> {one[-1][0]:.4f}, ordered {one[0][1]:.2f} -> {one[-1][1]:.2f}")
    layouts: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}]
    for layout in layouts:
        many = spawn(train, **layout)[0]
        assert all(abs(a[0] - b[0]) < 1e-4 for a, b in zip(one, many, strict=True)), layout
        print(f"{layout}: the same to 1e-4")
