"""Muon (Jordan et al., 2024): momentum, made orthogonal by Newton-Schulz iterations.

Its two halves are apart: momentum is elementwise and lives in slices, as any other state; only
what it gives is brought together to whole matrices (``matrix_exchange``).

Shapes: O output and I input features of a matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kenotron_optim.torch_rules import Uncompiled

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial x, x^3, x^5 that is applied to all singular values (Jordan et al., 2024)."""
EPS = 1e-7
"""Least norm that a matrix is divided by."""


class MuonMomentum(Uncompiled):
    """The elementwise half: decays weights, and replaces each gradient by what is to be orthogonal.

    Args:
        groups: torch's parameter groups.
        momentum: share of the velocity that each update keeps.
        nesterov: whether the gradient is looked at one step of the velocity ahead.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, nesterov: bool) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        """Decay the weights, update the velocities, and write directions into the gradients."""
        for group in self.param_groups:
            kept, left = group["momentum"], 1 - group["lr"] * group["weight_decay"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                parameter.mul_(left)
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                velocity = state["momentum_buffer"].lerp_(gradient, 1 - kept)
                ahead = kept if group["nesterov"] else 1.0
                gradient.lerp_(velocity, ahead)


def orthogonalize(x: Tensor, steps: int) -> Tensor:
    """Return a matrix (O, I) with singular values near 1 and the singular vectors of ``x``, bf16.

    The same operations as ``torch.optim.Muon``'s, so the same bits.
    """
    a, b, c = COEFFICIENTS
    wide = x.bfloat16() if x.shape[0] <= x.shape[1] else x.bfloat16().t()
    wide = wide / wide.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = wide @ wide.t()
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if x.shape[0] <= x.shape[1] else wide.t()


def scale_of(rows: int, columns: int) -> float:
    """Return the factor that gives an orthogonal update AdamW's size (Liu et al., 2025)."""
    return 0.2 * max(rows, columns) ** 0.5


def flops_of(rows: int, columns: int, steps: int) -> int:
    """Return the floating-point operations of ``orthogonalize``."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)
