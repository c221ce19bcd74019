"""First values of a model by maximal update parametrisation, and its factors as a table.

Shapes: O output and I input features of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kenotron_dist.boxes import Box
from kenotron_dist.init import Initializer, Normal, normal_block
from kenotron_dist.placement import TensorLayout
from kenotron_models.mup import ParameterScale
from kenotron_models.parameter_init import standard_init
from kenotron_models.spec import DecoderSpec


def mup_init(
    spec: DecoderSpec, scales: Mapping[str, ParameterScale]
) -> Callable[[TensorLayout], Initializer]:
    """Return the rule from a tensor to its first values, for ``kenotron_dist.init.initialize``.

    Args:
        spec: the model.
        scales: of ``mup_scales``.
    """
    constants = standard_init(spec, 0.0)

    def rule(layout: TensorLayout) -> Initializer:
        stds, outs = scales[layout.name].std, scales[layout.name].fan_out
        if not stds:
            return constants(layout)
        return Normal(stds[0]) if len(set(stds)) == 1 else FusedNormal(stds, outs)

    return rule


@dataclass(frozen=True)
class FusedNormal:
    """Normal draws of matrices whose rows follow one another: a standard deviation for each."""

    stds: tuple[float, ...]
    rows: tuple[int, ...]

    def block(self, layout: TensorLayout, box: Box, *, seed: int) -> Tensor:
        """Return one block of the logical tensor (..., O, I), fp32 on the CPU."""
        values = normal_block(layout.name, layout.shape, box, seed=seed)
        each = torch.tensor(self.stds).repeat_interleave(torch.tensor(self.rows))
        start = box.start[-2]
        return values * each[start : start + box.shape[-2], None]


def mup_table(scales: Mapping[str, ParameterScale]) -> str:
    """Return a table of factors: equal tensors of blocks that follow one another are one row.

    Args:
        scales: of ``mup_scales``.
    """
    rows = {("parameter", "role", "fans", "std", "lr x", "wd x"): None}
    for name, own in scales.items():
        words = ["*" if word.isdigit() else word for word in name.split(".")]
        fans = f"{own.fan_in} -> {' + '.join(map(str, own.fan_out))}"
        std = ", ".join(f"{each:.6g}" for each in dict.fromkeys(own.std)) or "constant"
        lr, decay = f"{own.lr:.6g}", f"{own.weight_decay:.6g}"
        rows[".".join(words), own.role, fans, std, lr, decay] = None
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
