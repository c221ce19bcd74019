"""A toy mixer and a toy family, as somebody adds them: this file, and one line in the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kenotron_dist import declare_roles
from kenotron_models.block import BlockSpec
from kenotron_models.build import Build
from kenotron_models.context import Context
from kenotron_models.family import Family
from kenotron_models.mlp import MLPSpec
from kenotron_models.norm import NormSpec
from kenotron_models.part import Normed, Part
from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class ShiftSpec:
    """Each token sees the one before it in its text."""

    name: ClassVar[str] = "shift"
    features: int

    def build(self, width: int, build: Build, layer: int) -> Shift:
        return Shift(self, width, build)

    def mixing_flops(self, batch: int, sequence: int, *, causal: bool) -> int:
        return batch * sequence * self.features

    def cost(self, width: int) -> int:
        return 2 * self.features * width


class Shift(Part):
    def __init__(self, spec: ShiftSpec, width: int, build: Build) -> None:
        super().__init__()
        self.read = build.column(width, spec.features)
        self.write = build.row(spec.features, width, bias=True)
        declare_roles(self.write, weight="residual")

    def forward(self, x: Tensor, context: Context, *, norm: Normed | None = None) -> Tensor:
        y = self.read(x if norm is None else norm(x), tokens=context.tokens)
        begins = (context.positions_BS == 0).flatten()[:, None]
        return self.write(y * y.roll(1, 0).masked_fill(begins, 0.0))


@dataclass(frozen=True, kw_only=True)
class ToyConfig:
    is_toy_config: bool = True
    depth: int = 2
    width: int = 16
    vocab_size: int = 21

    @property
    def decoder(self) -> DecoderSpec:
        norm = NormSpec(kind="layer_norm", eps=1e-3)
        shift, mlp = ShiftSpec(features=24), MLPSpec(features=32, activation="relu")
        blocks = [
            BlockSpec(mixer=shift, feed_forward=None if i == 1 else mlp, norm=norm)
            for i in range(self.depth)
        ]
        return DecoderSpec(
            hidden_size=self.width,
            vocab_size=self.vocab_size,
            max_position_embeddings=64,
            blocks=tuple(blocks),
            norm=norm,
            tie_word_embeddings=True,
        )


TOY = Family(marker="is_toy_config", config=ToyConfig)
