"""A mixer of one's own: each token reads the one before it, through a gate.

The module is compared with plain torch, and a training on layouts of two processes with one:
``python mixer.py``.

Shapes: B rows, S tokens of a row, T = B * S, D hidden, F features; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_data import Loader, RandomTokens
from kenotron_dist import Mesh, declare_roles, spawn
from kenotron_engine import ModelPlan, build_training, training_step
from kenotron_models import Build, Context, DecoderSpec
from kenotron_models.layers import BlockSpec, MLPSpec, NormSpec, Part
from kenotron_optim import AdamWConfig, LRSchedulerConfig, OptimizerConfig

Norm = Callable[[Tensor], Tensor]
"""A norm that a part applies to its input: (T, D) -> (T, D)."""


@dataclass(frozen=True, kw_only=True)
class ShiftSpec:
    """Config of the mixer."""

    name: ClassVar[str] = "shift"
    features: int

    def build(self, width: int, build: Build, layer: int) -> Shift:
        """Make the module."""
        return Shift(self, width, build)

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count operations besides products with weights: the gate and its product."""
        return 5 * batch * sequence * self.features

    def cost(self, width: int) -> int:
        """Count multiply-adds a token."""
        return 3 * self.features * width


class Shift(Part):
    """write(silu(gate(x)) * the value of the token before), (T, D) -> (T, D)."""

    def __init__(self, spec: ShiftSpec, width: int, build: Build) -> None:
        super().__init__()
        self.gate = build.column(width, spec.features)  # (F/t, D): its outputs are cut over tp
        self.value = build.column(width, spec.features)
        self.write = build.row(spec.features, width)  # (D, F/t): adds up over tp
        declare_roles(self.write, weight="residual")  # for first values and the optimizer

    def forward(self, x: Tensor, context: Context, *, norm: Norm | None = None) -> Tensor:
        """Mix. Positions begin again with each text, whose first token reads nothing."""
        x = x if norm is None else norm(x)
        gate = self.gate(x, tokens=context.tokens)  # (T, F/t)
        value = self.value(x, tokens=context.tokens)
        begins = (context.positions_BS == 0).flatten()[:, None]
        return self.write(F.silu(gate) * value.roll(1, 0).masked_fill(begins, 0.0))


def plain(mixer: Shift, x_BSD: Tensor) -> Tensor:
    """Compute the same with plain torch, token by token: (B, S, D)."""
    gate, value, write = (next(each.parameters()) for each in mixer.children())
    outputs, before = [], x_BSD.new_zeros(len(x_BSD), len(value))
    for x_BD in x_BSD.unbind(1):
        outputs.append(nn.functional.linear(F.silu(x_BD @ gate.T) * before, write))
        before = x_BD @ value.T
    return torch.stack(outputs, 1)


NORM = NormSpec(kind="rms_norm", eps=1e-5)
BLOCK = BlockSpec(mixer=ShiftSpec(features=48), feed_forward=MLPSpec(features=64), norm=NORM)
MODEL = DecoderSpec(
    hidden_size=32, vocab_size=61, max_position_embeddings=64, blocks=(BLOCK,) * 2, norm=NORM,
    tie_word_embeddings=True,
)  # fmt: skip
ADAMW = OptimizerConfig(
    optimizer_factory=AdamWConfig(
        adam_eps=1e-8, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True
    ),
    zero_stage=1, weight_decay=0.0, clip_grad=1.0, accumulate_grad_in_fp32=True,
    learning_rate_scheduler=LRSchedulerConfig(learning_rate=1e-2, min_decay_lr=1e-3),
)  # fmt: skip
TOKENS = RandomTokens(61, 16, seed=1, samples=8)


def train(mesh: Mesh, steps: int = 10) -> list[float]:
    """Loss of each step. Runs on every rank."""
    training = build_training(ModelPlan(spec=MODEL), ADAMW, mesh, steps)
    loader = Loader(
        TOKENS, seed=7, microbatches=2, micro_batch_size=4 // mesh["dp"].size,
        dp_rank=mesh["dp"].rank, dp_size=mesh["dp"].size,
    )  # fmt: skip
    with loader:
        batch = next(loader)
    return [training_step(training, batch, step).loss for step in range(1, steps + 1)]


@torch.no_grad()
def difference(mesh: Mesh) -> float:
    """Return how far the module is from plain torch. For one process."""
    mixer = ShiftSpec(features=48).build(32, Build(mesh["tp"]), layer=0).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(3, 5, 32)
    context = Context(torch.arange(5).expand(3, 5))
    return float((mixer(x.flatten(0, 1), context).view_as(x) - plain(mixer, x)).abs().max())


if __name__ == "__main__":
    apart = spawn(difference)[0]
    assert apart < 1e-5, f"an output is {apart} from plain torch"
    print(f"outputs within {apart:.0e} of plain torch", flush=True)
    one = spawn(train)[0]
    print(f"loss {one[0]:.4f} -> {one[-1]:.4f}", flush=True)
    layouts: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"pp": 2}]
    for layout in layouts:
        many = spawn(train, **layout)[0]
        assert all(abs(a - b) < 1e-4 for a, b in zip(one, many, strict=True)), layout
        print(f"{layout}: the same to 1e-4", flush=True)
