"""A loss and a mixer of one's own, on public names: the curve of plain torch on every layout.

The mixer gives each token a gated mean of the values before it; the loss weighs a token by how
unlikely its target is (focal loss, arXiv 1708.02002). ``plain`` is the same training in torch.

Shapes: B rows, S tokens of a row, T = B * S, D hidden, F features, V vocabulary; ``/t`` is divided
by tp size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron_data import Batch, Loader, PackedTokens, builtin_documents
from kenotron_dist import Mesh, declare_roles, spawn
from kenotron_dist.placement import named_parameters
from kenotron_engine import (
    MicroLoss,
    ModelOnMesh,
    ModelPlan,
    Parts,
    Share,
    build_training,
    global_counts,
    token_losses,
    training_step,
)
from kenotron_models import Build, Context, DecoderSpec
from kenotron_models.layers import BlockSpec, NormSpec, Part
from kenotron_optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig

Norm = Callable[[Tensor], Tensor]
LENGTH, RATE = 64, 1e-3


@dataclass(frozen=True, kw_only=True)
class MeanSpec:
    """Config of the mixer."""

    name: ClassVar[str] = "mean"
    features: int

    def build(self, width: int, build: Build, layer: int) -> Mean:
        """Make the module."""
        return Mean(self, width, build)

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count operations besides products with weights."""
        return 6 * batch * sequence * self.features

    def cost(self, width: int) -> int:
        """Count multiply-adds a token."""
        return 3 * self.features * width


class Mean(Part):
    """write(silu(gate(x)) * mean of value(x) so far), (T, D) -> (T, D)."""

    def __init__(self, spec: MeanSpec, width: int, build: Build) -> None:
        super().__init__()
        self.gate = build.column(width, spec.features)
        self.value = build.column(width, spec.features)
        self.write = build.row(spec.features, width)
        declare_roles(self.write, weight="residual")

    def forward(self, x: Tensor, context: Context, *, norm: Norm | None = None) -> Tensor:
        """Mix rows that are one text each."""
        x = x if norm is None else norm(x)
        gate = self.gate(x, tokens=context.tokens)  # (T, F/t)
        value = self.value(x, tokens=context.tokens)
        places = context.positions_BS
        sums = value.view(*places.shape, -1).cumsum(1)
        return self.write(F.silu(gate) * (sums / (places + 1)[..., None]).flatten(0, 1))


@dataclass(frozen=True)
class Focal:
    """Mean over targets of (1 - p) * -log p, where p is the target's probability."""

    reports = ("cross_entropy",)
    columns = 0

    def counts(self, batch: Batch, mesh: Mesh) -> Tensor:
        """Targets and tokens of the global batch."""
        return global_counts(batch, mesh)

    def loss(self, model: ModelOnMesh, share: Share, count: Tensor) -> MicroLoss:
        """The loss of the tokens of a micro-batch; the vocabulary stays cut over tp."""

        def loss(x: Tensor, microbatch: int) -> Parts:
            each = token_losses(model, x, share.micros[microbatch].labels_BS)  # (T,)
            weighed = (1 - torch.exp(-each)) * each
            return Parts(weighed.sum() / count, (each.detach().sum() / count,))

        return loss

    def reported(self, loss: Tensor, reports: Tensor) -> Tensor:
        """All of the loss is reported."""
        return loss

    def outcome(
        self, loss: float, reports: Sequence[float], rows: Sequence[float]
    ) -> tuple[float, dict[str, Any]]:
        """The loss, and the cross entropy as a figure."""
        return loss, {"cross_entropy": reports[0]}


NORM = NormSpec(kind="rms_norm", eps=1e-5)
BLOCK = BlockSpec(mixer=MeanSpec(features=96), feed_forward=None, norm=NORM)
MODEL = DecoderSpec(
    hidden_size=64, vocab_size=256, max_position_embeddings=LENGTH, blocks=(BLOCK,) * 4, norm=NORM,
    tie_word_embeddings=False,
)  # fmt: skip
ADAMW = OptimizerConfig(
    optimizer_factory=AdamWConfig(
        adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True
    ),
    zero_stage=1, weight_decay=0.0, clip_grad=1.0, accumulate_grad_in_fp32=True,
    learning_rate_scheduler=LRSchedulerConfig(learning_rate=RATE, min_decay_lr=RATE),
)  # fmt: skip
LAYOUTS: list[dict[str, Any]] = [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}]


def batches(mesh: Mesh) -> Loader:
    """Rows of this data rank."""
    text = "".join(builtin_documents(limit=400_000)).encode()
    corpus = PackedTokens(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), LENGTH)
    dp = mesh["dp"]
    return Loader(
        corpus, seed=1, microbatches=2, micro_batch_size=8 // dp.size, dp_rank=dp.rank,
        dp_size=dp.size,
    )  # fmt: skip


def train(mesh: Mesh, steps: int) -> list[float]:
    """Loss of each step. Runs on every rank."""
    training = build_training(ModelPlan(spec=MODEL), ADAMW, mesh, steps)
    with batches(mesh) as loader:
        every = range(1, steps + 1)
        return [training_step(training, next(loader), n, objective=Focal()).loss for n in every]


def logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Compute the model in plain torch: tokens (B, S) -> (B, S, V)."""
    table, *blocks, last, head = weights.values()
    x = table[tokens]
    divisor = torch.arange(1, tokens.shape[1] + 1)[:, None]
    for at in range(0, len(blocks), 4):
        norm, gate, value, write = blocks[at : at + 4]
        y = F.rms_norm(x, norm.shape, norm, eps=1e-5)
        y = F.silu(y @ gate.T) * ((y @ value.T).cumsum(1) / divisor)
        x = x + y @ write.T
    return F.rms_norm(x, last.shape, last, eps=1e-5) @ head.T


def plain(mesh: Mesh, steps: int) -> list[float]:
    """Train in plain torch, from the same first weights, on the same rows."""
    first = build_training(ModelPlan(spec=MODEL), ADAMW, mesh, steps).model.stack
    found = {name: p.detach().clone() for name, p in named_parameters(first).items()}
    weights = {name: each.requires_grad_() for name, each in found.items()}
    adamw = torch.optim.AdamW(weights.values(), RATE, (0.9, 0.95), 1e-8, weight_decay=0.0)
    losses = []
    with batches(mesh) as loader:
        for _ in range(steps):
            batch = next(loader)
            scores = logits(weights, batch.tokens_MBS.flatten(0, 1)).flatten(0, 1)
            each = F.cross_entropy(scores, batch.labels_MBS.flatten(), reduction="none")
            loss = ((1 - torch.exp(-each)) * each).mean()
            adamw.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
            adamw.step()
            losses.append(loss.item())
    return losses


def draw(reference: list[float], curves: dict[str, list[float]], file: str) -> None:
    """Draw plain torch's curve, and the others as marks on it."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kenotron", "font.size": 11}
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    steps = range(1, len(reference) + 1)
    axes.plot(steps, reference, color="black", linewidth=1, label="plain torch")
    for place, ((name, losses), mark) in enumerate(zip(curves.items(), "osx+", strict=True)):
        own = slice(3 * place, None, 12)
        axes.plot(steps[own], losses[own], mark, label=name)
    axes.set(xlabel="step", ylabel="focal loss", title="A mixer and a loss of one's own")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def main(steps: int, file: str) -> None:
    """Train in plain torch and on four layouts, compare and draw."""
    reference, curves = spawn(plain, steps)[0], {}
    print(f"plain torch: loss {reference[0]:.4f} -> {reference[-1]:.4f}")
    for layout in LAYOUTS:
        name = " ".join(f"{axis} {size}" for axis, size in layout.items()) or "one process"
        curves[name] = spawn(train, steps, **layout)[0]
        apart = max(abs(a - b) for a, b in zip(curves[name], reference, strict=True))
        print(f"{name}: losses within {apart:.0e} of plain torch")
        assert apart < 1e-3, apart
    draw(reference, curves, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", default="own_loss_and_mixer.svg", help="the picture")
    given = parser.parse_args()
    main(given.steps, given.out)
