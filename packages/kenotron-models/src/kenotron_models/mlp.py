"""The feed-forward block, gated (SwiGLU: Shazeer, arXiv 2002.05202) or not.

Shapes: T flattened tokens, D hidden, F feed-forward; ``/t`` is divided by tp size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from kenotron_dist import declare_roles
from kenotron_dist.placement import Chunk
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.part import Normed, Part
from kenotron_models.recompute import between

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class ClampedSwiGLU:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` of clamped features (gpt-oss)."""

    alpha: float = 1.702
    """Factor of the gate inside the sigmoid."""
    limit: float = 7.0
    """The gate is at most this, and up between this and its negative."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """(..., F) and (..., F) -> (..., F)."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * (gate * self.alpha).sigmoid())


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` without gate."""

    name: ClassVar[str] = "mlp"
    features: int
    """F, inner width."""
    gated: bool = True
    """True where there is a gate."""
    activation: Activation | ClampedSwiGLU = "silu"
    """Its act."""
    bias: bool = False
    """Its matrices have biases."""

    def build(self, width: int, build: Build, layer: int = 0) -> MLP:
        """Make the module; see ``PartSpec``."""
        return MLP(self, width, build)

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        """Count nothing: all its operations are products with matrices."""
        return 0

    def cost(self, width: int) -> int:
        """Count its two or three products."""
        return (3 if self.gated else 2) * self.features * width


class Activated(Protocol):
    """A feed-forward with an activation, with or without gate."""

    @property
    def gated(self) -> bool:
        """True where there is a gate."""
        ...

    @property
    def activation(self) -> Activation | ClampedSwiGLU:
        """Name of the activation."""
        ...


def activated(spec: Activated, y: Tensor, *, alternating: bool = False) -> Tensor:
    """(..., 2F), or (..., F) without gate -> (..., F).

    ``alternating``: features of gate and up follow one another in turn, not all of the gate first.
    """
    act = spec.activation
    if not spec.gated:
        assert isinstance(act, str)
        return ACTIVATIONS[act](y)
    gate, up = (y[..., 0::2], y[..., 1::2]) if alternating else y.chunk(2, -1)
    return act(gate, up) if isinstance(act, ClampedSwiGLU) else ACTIVATIONS[act](gate) * up


class MLP(Part):
    """Gate and up are one matrix (2F, D), ``gate_up``; without gate it is ``up`` (F, D).

    ``forward``: (T, D) -> (T, D), (T/t, D) under sequence parallelism. Raises ValueError when the
    axis does not divide F.
    """

    cuts_sequence = True
    in_shards = True

    def __init__(self, spec: MLPSpec, width: int, build: Build) -> None:
        super().__init__()
        self.spec = spec
        chunks = (Chunk(spec.features),) * (2 if spec.gated else 1)
        rows = len(chunks) * spec.features
        first = build.column(width, rows, bias=spec.bias, chunks=chunks)
        self.add_module("gate_up" if spec.gated else "up", first)
        self.down = build.row(spec.features, width, bias=spec.bias)
        declare_roles(self.down, weight="residual")

    @property
    def first(self) -> nn.Module:
        """The matrix that reads the block's input."""
        return self.get_submodule("gate_up" if self.spec.gated else "up")

    def activate(self, y: Tensor) -> Tensor:
        """(T, 2F/t), or (T, F/t) without gate -> (T, F/t)."""
        return activated(self.spec, y)

    def forward(
        self, x: Tensor, context: Context | None = None, *, norm: Normed | None = None
    ) -> Tensor:
        """(T, D) -> (T, D).

        Args:
            x: tokens.
            context: the micro-batch, where tokens are cut and the axis does not divide them.
            norm: applied to x first: then neither its result nor the activations are kept for the
                backward.
        """
        tokens = None if context is None else context.tokens
        if norm is None:
            return self.down(self.activate(self.first(x, tokens=tokens)))
        y = between(norm, x, partial(self.first, tokens=tokens))
        return between(self.activate, y, self.down)
